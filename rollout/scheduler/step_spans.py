"""The requests of a step as spans of its tokens, and the routes that they replay.

Shapes: L MoE layers, T tokens of the step, K top-k, R rows of routes that a request sent.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rollout.core.host_copy import to_device
from rollout.scheduler.policy import StepPlan
from rollout.scheduler.req import Req
from rollout.scheduler.verify import VerifiedRows

_FREE = -1  # in a row of forced routes: the router chooses


def spans_of(plan: StepPlan, verified: VerifiedRows | None = None) -> Iterator[tuple[Req, int, int]]:
    """Yield the first position and the count of each request's tokens in the step, in the order of its batch."""
    for item in plan.extends:
        yield item.req, item.start, item.count
    if verified is not None:
        yield from ((req, req.device_len, 1 + len(draft)) for req, draft in zip(verified.reqs, verified.drafts))
        return
    for req in plan.decodes.reqs:
        yield req, req.device_len, 1


def forced_routes(plan: StepPlan, verified: VerifiedRows | None, device: torch.device) -> torch.Tensor | None:
    """Return the routes that requests of the step replay, for the routers: [L, T, K]; None if all rows are free."""
    spans = list(spans_of(plan, verified))
    example = next((req.source.replay for req, _, _ in spans if req.source.replay is not None), None)
    if example is None:
        return None
    _, num_layers, top_k = example.shape
    forced_TLK = np.full((sum(count for _, _, count in spans), num_layers, top_k), _FREE, dtype=np.int64)
    first = 0
    for req, start, count in spans:
        if (replay := req.source.replay) is not None:
            rows_RLK = np.frombuffer(replay.data, dtype="<u2").reshape(replay.shape)
            begin = start - replay.start  # among the rows that the request sent
            known = rows_RLK[max(begin, 0) : max(begin + count, 0)]
            place = first + max(-begin, 0)
            forced_TLK[place : place + len(known)] = known
        first += count
    return to_device(torch.from_numpy(forced_TLK).transpose(0, 1).contiguous(), device)

"""Routes that requests bring along, as one step's tensor for the routers.

Shapes: T tokens of the step, L MoE layers, K top-k, R rows that a request brought.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from rollout.scheduler.req import Req

FREE = -1  # in a row that the router chooses for itself


def forced_routes(spans: Iterable[tuple[Req, int, int]], device: torch.device) -> torch.Tensor | None:
    """Of a step that computes `count` tokens of each request from a position on: [L, T, K]; None if all are free."""
    spans = list(spans)
    example = next((req.source.replay for req, _, _ in spans if req.source.replay is not None), None)
    if example is None:
        return None
    _, num_layers, top_k = example.shape
    forced_TLK = np.full((sum(count for _, _, count in spans), num_layers, top_k), FREE, dtype=np.int64)
    first = 0
    for req, start, count in spans:
        if (replay := req.source.replay) is not None:
            rows_RLK = np.frombuffer(replay.data, dtype="<u2").reshape(replay.shape)
            begin = start - replay.start  # among the rows that it brought
            known = rows_RLK[max(begin, 0) : max(begin + count, 0)]
            place = first + max(-begin, 0)
            forced_TLK[place : place + len(known)] = known
        first += count
    return torch.from_numpy(forced_TLK).transpose(0, 1).contiguous().to(device)

"""`InFlight`: a launched step, with the results that are on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rollout.core.forward_batch import StepKind
from rollout.core.host_copy import HostCopies
from rollout.executor.model_runner import StepRoutes
from rollout.model.model_state import ServingEpoch
from rollout.sampling.base import SampledTokens, ScoredTokens
from rollout.scheduler.hidden_rows import HiddenPart
from rollout.scheduler.records import SampledRows
from rollout.scheduler.req import Req
from rollout.scheduler.verify import Observed, Verified


class Sampled(NamedTuple):
    """A token for each of `rows`.  `last`: the numbers of the rows that get no further token."""

    rows: SampledRows
    tokens: SampledTokens
    last: Sequence[int]


class RankCounts(NamedTuple):
    """The tokens of each attention-DP rank in a step, and the least kind of step that any of them has.

    Ranks replay a captured step together or not at all, so each of them knows both.
    """

    tokens: list[int]
    kind: StepKind


class InFlight(NamedTuple):
    """A launched step.  Its tensors are its own and nothing changes them; after `copies.wait()` they are on the host.

    `completed`: requests whose known tokens all have their KV after this step.  `ending`: requests that have all their
    tokens after it, so that no step follows.  `num_ended`: see `StepRunner`.  `is_idle`: it has no tokens of this rank.
    """

    epoch: ServingEpoch
    num_ended: int
    routes: StepRoutes | None
    completed: Sequence[Req] = ()
    ending: Sequence[Req] = ()
    sampled: Sequence[Sampled] = ()
    scored: Sequence[tuple[Req, ScoredTokens]] = ()
    pooled: Sequence[tuple[Req, torch.Tensor]] = ()
    hidden: Sequence[HiddenPart] = ()
    verified: Verified | None = None
    observed: Observed | None = None
    is_idle: bool = False
    copies: HostCopies | None = None  # None: computed on the host

    @property
    def sampling(self) -> list[Req]:
        return [req for part in self.sampled for req in part.rows.reqs]

    def brought(self, device: torch.device) -> InFlight:
        """Return the step with its results on their way from `device` to the host."""
        copies = HostCopies(device)
        step = self._replace(
            routes=None if self.routes is None else StepRoutes(*map(copies.copy, self.routes)),
            sampled=[part._replace(tokens=copies.copy_all(part.tokens)) for part in self.sampled],
            scored=[(req, copies.copy_all(scored)) for req, scored in self.scored],
            pooled=[(req, copies.copy(rows)) for req, rows in self.pooled],
            hidden=[part._replace(rows_nLD=copies.copy(part.rows_nLD)) for part in self.hidden],
            verified=self.verified and self.verified._replace(tokens=copies.copy_all(self.verified.tokens)),
            copies=copies,
        )
        copies.close()
        return step

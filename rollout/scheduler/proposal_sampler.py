"""`ProposalSampler`: picks the tokens that a model proposes, as the served sampler would pick them.

Seeds, positions and parameters are the request's.  A request with a restriction gets a token that may come after the
ones proposed before it.  So where both distributions are alike, the same random number mostly gives the same token.

Shapes: N requests that get a proposal of this depth, the first ones of all; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.grammar.restriction import Restriction
from rollout.grammar.rows import RestrictedRows
from rollout.sampling.base import Sampler
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow


class ProposalSampler:
    """Called for one depth after the other, from 0 on.  `restrictions` are copies that go on by themselves.

    `positions_N` are the positions of the first proposals in the outputs, on the host.
    """

    def __init__(
        self,
        sampler: Sampler,
        rows: Sequence[SamplingRow],
        restrictions: Sequence[Restriction | None],
        positions_N: torch.Tensor,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._sampler = sampler
        self._rows, self._positions_N = rows, positions_N
        self._restrictions = restrictions
        self._vocab_size, self._device = vocab_size, device
        self._info = SamplingBatchInfo((), vocab_size, device)
        self._sets: RestrictedRows | None = None  # of the restricted rows of `_info`
        self._picked: torch.Tensor | None = None  # of the depth before

    def __call__(self, logits_NV: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the picked ids [N].  Where a row has a restriction the host waits for the ids before."""
        count = logits_NV.shape[0]
        if len(self._info.rows) != count:
            self._info = SamplingBatchInfo(self._rows[:count], self._vocab_size, self._device)
            places = [place for place in self._restrictions[:count] if place is not None]
            self._sets = RestrictedRows(places, self._info.allowed_GW) if places else None
        self._restrict(count)
        self._picked = self._sampler.sample(logits_NV, self._info, self._positions_N[:count] + depth).token_ids
        return self._picked

    def _restrict(self, count: int) -> None:
        """Write the tokens that restricted rows may get, after those picked before."""
        if self._sets is not None:
            if self._picked is not None:
                self._feed(self._picked[:count].tolist())
            self._sets.write()

    def _feed(self, token_ids: Sequence[int]) -> None:
        for place, token_id in zip(self._restrictions, token_ids, strict=False):
            if place is not None:
                place.feed([token_id])

"""`DPSync`: how many tokens each data-parallel attention rank brings to a step.

Experts are spread over all ranks, so that all take part in a step if any has work; one without brings no tokens.
Knows counts.  Does not know requests.
"""

from __future__ import annotations

from rollout.distributed.communicator import Communicator


class DPSync:
    """Over one rank of each attention group.  `busy`: whether any had work when last asked."""

    def __init__(self, attn_dp: Communicator) -> None:
        self._attn_dp = attn_dp
        self.busy = False

    @property
    def is_alone(self) -> bool:
        return self._attn_dp.size == 1

    def token_counts(self, mine: int) -> list[int]:
        """Tokens of every data-parallel rank in the step that comes.  Raises `RankLostError`."""
        counts = [count for (count,) in self._attn_dp.gather_ints([mine])]
        self.busy = any(counts)
        return counts

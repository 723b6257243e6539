"""`DPRouter`: which data-parallel rank runs a sample: the one asked for, else the one with the least left to do.

Knows the tokens that each rank may still have to compute.  Does not know what ranks share.
"""

from __future__ import annotations

from rollout.core.errors import BadRequest


class DPRouter:
    """The load of a sample is its prompt and the most that it may generate, until it is over."""

    def __init__(self, num_ranks: int) -> None:
        self._load = [0] * num_ranks
        self._samples: dict[str, tuple[int, int]] = {}

    @property
    def num_ranks(self) -> int:
        return len(self._load)

    def check(self, wanted: int | None) -> None:
        """Raises `BadRequest` for a rank that is not there."""
        if wanted is not None and not 0 <= wanted < self.num_ranks:
            raise BadRequest(f"routed_dp_rank must be in 0..{self.num_ranks - 1} (--dp-size), got {wanted}")

    def assign(self, rid: str, num_tokens: int, wanted: int | None) -> int:
        """The rank of a sample of `num_tokens`; of equally loaded ones the first."""
        rank = self._load.index(min(self._load)) if wanted is None else wanted
        self._load[rank] += num_tokens
        self._samples[rid] = rank, num_tokens
        return rank

    def release(self, rid: str) -> None:
        """The sample is over; one that was never assigned is no error."""
        rank, num_tokens = self._samples.pop(rid, (0, 0))
        self._load[rank] -= num_tokens

    def clear(self) -> None:
        self._samples.clear()
        self._load = [0] * self.num_ranks

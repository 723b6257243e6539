"""What the weight I/O threads of all ranks tell each other, so that a job has failed everywhere if it failed anywhere.

    job on every rank:   io ... one vote, if the job has one (the check of a whole update) ... how it went

A rank whose part fails before the vote still votes, with no: the calls of all ranks match whatever happens on one.

Knows jobs' outcomes.  Does not know what a job does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from rollout.core.errors import LockstepError, status_of
from rollout.distributed.communicator import Communicator

T = TypeVar("T")


class PeerRankError(LockstepError):
    """Another rank could not do its part; the status is its own."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code  # type: ignore[misc]


class _Outcome(msgspec.Struct):
    failed: bool = False
    message: str = ""
    status_code: int = 200


class RankConsensus:
    """Over the communicator that belongs to the weight I/O threads."""

    def __init__(self, weight_io: Communicator) -> None:
        self._weight_io = weight_io
        self._has_voted = False

    def vote(self, mine: bool) -> bool:
        """Whether all ranks say yes; once in a job."""
        self._has_voted = True
        return self._weight_io.all_agree(mine)

    def run(self, work: Callable[[], T], *, votes: bool, take_back: Callable[[str], None] | None) -> T:
        """`work()` on every rank.  `votes`: it casts one vote.  `take_back(reason)`: it went well only here.

        Raises this rank's error, else `PeerRankError` with that of the first rank that failed.
        """
        if self._weight_io.size == 1:
            return work()
        self._has_voted = False
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        assert votes or not self._has_voted, "a job that votes says so"
        if votes and not self._has_voted:
            self.vote(error is None)
        outcomes = self._share(error)
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome.failed:
                reason = f"rank {rank}: {outcome.message}"
                if take_back is not None:
                    take_back(reason)
                raise PeerRankError(reason, outcome.status_code)
        return result

    def _share(self, error: Exception | None) -> list[_Outcome]:
        mine = _Outcome() if error is None else _Outcome(True, str(error) or type(error).__name__, status_of(error))
        shared = self._weight_io.gather_bytes(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(data, type=_Outcome) for data in shared]

"""What the weight I/O threads of all ranks tell each other, so that a job has failed everywhere if it failed anywhere.

    job on every rank:   io ... its exchanges, if it has any (a vote on a whole update, shares of a sum) ... how it went

A rank whose part fails before an exchange still takes part, with nothing to bring: the calls of all ranks match
whatever happens on one.

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
        self._num_exchanges = 0

    def exchange(self, mine: bytes) -> list[bytes]:
        """What every rank brings, by rank.  Raises `PeerRankError` on all of them where one failed before it."""
        return self._exchange(mine)

    def vote(self, mine: bool) -> bool:
        """Whether all ranks say yes: an exchange."""
        try:
            self._exchange(b"" if mine else None)
        except PeerRankError:
            return False
        return True

    def run(self, work: Callable[[], T], *, votes: int, take_back: Callable[[str], None] | None) -> T:
        """`work()` on every rank.  `votes`: its exchanges.  `take_back(reason)`: it went well only here.

        Raises this rank's error, else `PeerRankError` with that of the first rank that failed.
        """
        if self._weight_io.size == 1:
            return work()
        self._num_exchanges = 0
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        assert votes or not self._num_exchanges, "a job that has exchanges says so"
        while self._num_exchanges < votes:
            self.vote(error is None)
        outcomes = self._share(error)
        if error is not None and not isinstance(error, PeerRankError):
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome.failed:
                reason = f"rank {rank}: {outcome.message}"
                if take_back is not None and error is None:
                    take_back(reason)
                raise PeerRankError(reason, outcome.status_code)
        if error is not None:
            raise error
        return result

    def _exchange(self, mine: bytes | None) -> list[bytes]:
        self._num_exchanges += 1
        shared = self._weight_io.gather_bytes(b"" if mine is None else b"+" + mine)
        if not all(shared):
            raise PeerRankError("another rank failed", 500)
        return [data[1:] for data in shared]

    def _share(self, error: Exception | None) -> list[_Outcome]:
        mine = _Outcome()
        if error is not None and not isinstance(error, PeerRankError):  # that rank says itself why
            mine = _Outcome(True, str(error) or type(error).__name__, status_of(error))
        shared = self._weight_io.gather_bytes(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(data, type=_Outcome) for data in shared]

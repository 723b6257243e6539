"""Agreement of the ranks of all engines of the server on a weight verb: it succeeds everywhere or nowhere.

    I/O thread of every rank     planned, io ... exchange* (a plan to share, the vote on a whole update) ... over
    scheduler's thread           step part: one vote on whether the weights were written

Every exchange names its verb and the weights that the rank serves.  The part of a rank is over when it failed or has
nothing left to do.  Then the rank sends this in place of the exchange in which the others are, and the verb is over for
all of them.  So the calls of all ranks match in every case.  Between two exchanges there is no communication.

An exchange that raises is in doubt: some ranks may have data that others lack.  That ends the engine, as do ranks that
are at different verbs or serve different versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from rollout.core.errors import FatalError, LockstepError, status_of
from rollout.distributed.communicator import Communicator, RankLostError
from weight_sync.errors import LostVoteError

T = TypeVar("T")


class PeerRankError(LockstepError):
    """Another rank could not do its part.  The status is that rank's."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class VerbMark(msgspec.Struct, frozen=True):
    """The verb that a rank is at, and the weights that it served when that verb's turn came."""

    number: int  # of verbs whose turn came before
    request_id: str
    weight_version: str
    weight_epoch: int


class _Report(msgspec.Struct):
    """`payload` None: this rank's part is over, with `error` and its status.  An empty `error` means success.

    `is_echo`: this rank failed as another one refused, which has the reason.
    """

    mark: VerbMark
    payload: bytes | None = None
    error: str = ""
    status_code: int = 200
    is_echo: bool = False


class RankConsensus:
    """`weight_io` belongs to the weight I/O threads, `world` to the schedulers' own."""

    def __init__(self, weight_io: Communicator, world: Communicator) -> None:
        self._weight_io = weight_io
        self._world = world
        self._mark: VerbMark | None = None
        self._failure: PeerRankError | None = None  # why it ended for all ranks, while one still exchanged

    @property
    def is_alone(self) -> bool:
        return self._weight_io.size == 1

    def exchange(self, mine: bytes) -> list[bytes]:
        """Return every rank's payload, by rank.  Raises `PeerRankError` if another rank's part is over.

        Called within `run`.
        """
        if self.is_alone:
            return [mine]
        if self._failure is not None:  # the others have left
            raise self._failure
        reports = self._share(_Report(self._current, mine))
        self._failure = _failure_of(reports)
        if self._failure is not None:
            raise self._failure
        return [report.payload or b"" for report in reports]

    def vote(self, mine: bool) -> bool:
        """Return whether all ranks vote yes, and no rank's part is over.  Called within `run`."""
        try:
            return all(vote == b"yes" for vote in self.exchange(b"yes" if mine else b"no"))
        except PeerRankError:
            return False

    def commit_vote(self, mine: bool) -> bool:
        """Return whether the new weights were written on all ranks.  On the scheduler's thread.

        Raises `RankLostError`: it is unknown whether the others put them in force.
        """
        try:
            return self._world.all_agree(mine)
        except RankLostError as error:
            raise RankLostError(f"the commit of a weight update is in doubt: {error}") from error

    def run(self, mark: VerbMark, work: Callable[[], T], roll_back: Callable[[str], None] | None) -> T:
        """Run `work()` on every rank.  `roll_back(reason)` undoes it if another rank failed.

        Raises this rank's error, else `PeerRankError` with the error of the first rank that failed; `FatalError`.  A
        lost vote is no error of this rank's own, where another rank reports one.
        """
        if self.is_alone:
            return work()
        self._mark, self._failure = mark, None
        error: Exception | None = None
        try:
            result = work()
        except FatalError:
            raise
        except Exception as raised:
            error = raised
        if self._failure is not None:  # learnt in an exchange; this rank's error is its consequence
            raise self._failure from error
        failure = _failure_of(self._share(_over(mark, error)))
        if error is not None:
            raise (failure or error) if isinstance(error, LostVoteError) else error
        if failure is not None:
            if roll_back is not None:
                roll_back(str(failure))
            raise failure
        return result

    @property
    def _current(self) -> VerbMark:
        assert self._mark is not None, "ranks exchange something within a verb only"
        return self._mark

    def _share(self, mine: _Report) -> list[_Report]:
        """Return the reports of all ranks.  Raises `RankLostError`, `FatalError`."""
        shared = self._weight_io.gather_bytes(msgspec.msgpack.encode(mine))
        reports = [msgspec.msgpack.decode(data, type=_Report) for data in shared]
        marks = {report.mark for report in reports}
        if len(marks) > 1:
            raise FatalError(f"the ranks are not at the same weight verb: {sorted(map(str, marks))}")
        return reports


def _over(mark: VerbMark, error: Exception | None) -> _Report:
    if error is None:
        return _Report(mark)
    text, is_echo = str(error) or type(error).__name__, isinstance(error, LostVoteError)
    return _Report(mark, error=text, status_code=status_of(error), is_echo=is_echo)


def _failure_of(reports: list[_Report]) -> PeerRankError | None:
    """Return why the verb has failed, the same for all ranks; None if all go on, or all have succeeded."""
    failed = [(rank, report) for rank, report in enumerate(reports) if report.error]
    if failed:
        rank, report = min(failed, key=lambda found: found[1].is_echo)
        return PeerRankError(f"rank {rank}: {report.error}", report.status_code)
    over = [report.payload is None for report in reports]
    if any(over) and not all(over):
        states = f"rank {over.index(True)} had nothing left to agree on, rank {over.index(False)} had"
        return PeerRankError(f"the ranks are in different states: {states}", 409)
    return None

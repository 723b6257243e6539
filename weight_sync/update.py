"""`WeightUpdate`: one weight update, from its opening to its end.  To understand refreshes, read this file first.

     begin, or a call without begin that `RULE` lets open one
       |
       v         a call of its sender brings tensors; each one renews the lease
      OPEN <-----------------------------------------.
       |  `------------------------------------------'
       |  `--- a call fails ----------------------------> FAILED --- abort, end, lease --> dropped
       |  `--- abort, lease, the pause ended by itself ----------------------------------> dropped
       v         end, continue, or the call that completes it: verify, all ranks vote
    VERIFIED --- something is missing, a vote is lost, abort, lease ---------------------> dropped
       |
       v         between two steps: commit, all ranks vote again
    COMMITTED    a write fails or the vote is lost: the old weights are put back --------> dropped
                 that fails: the target is `torn`; the vote raises: in doubt, the engine ends

A dropped update is `aborted` if a call's answer reports that, else `lost`.  `UpdateBook` remembers the last ones that
ended.  `WeightUpdater` holds the one that is open.  `WeightTransaction` has its tensors: it checks and stages them.

A call is of an update (`foreign`), or is refused and changes nothing:

    a call with its id         is of it, and from then on all its calls must carry the id (it is *bound*)
    a call with another id     is foreign
    a call without an id       is of it, unless it is bound or has another version
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from weight_sync.content import ContentBook, Digests
from weight_sync.errors import TransactionStateError, WeightSyncError
from weight_sync.held_format import HeldFormats
from weight_sync.loading import Coverage
from weight_sync.receivers.base import BucketSource, deliver
from weight_sync.tensor_meta import LogicalWeights
from weight_sync.transaction import TransactionState, WeightTransaction
from weight_sync.update_book import EndedUpdate, Outcome
from weight_sync.waiting import Lease

# --- calls without begin ---------------------------------------------------------------------------------------------


class Engine(enum.Enum):
    """The state of the engine when a call comes."""

    PAUSED = "paused, or about to be"
    RUNNING = "running"
    EMPTY = "running without content: the weights' memory was released"


class Relation(enum.Enum):
    """The relation of a call that brings tensors to the update that is open."""

    FIRST = "without id, none is open"
    LOST = "without id, none is open, and one was lost since the last new start"
    NEW_PAUSE = "without id, the open one was left by a client without begin at an earlier pause"
    JOINED = "without id, of the open one, which has no begin"
    SAME = "with the id of the open one, which has no begin"
    BEGUN = "of the open one, which has a begin"
    FOREIGN = "of another update"


class Deed(NamedTuple):
    """The effect of a call.  `opens`: an update is opened with that coverage, and one that is open is dropped.

    `settles`: which call commits the update.
    """

    effect: str
    opens: Coverage | None = None
    settles: Literal["a later call", "this call", "the call that completes it"] = "a later call"
    refused: bool = False


REFUSE = Deed("a 409 that changes nothing", refused=True)
JOIN = Deed("joins the open update; a later call settles it")
OPEN = Deed("opens an update of all tensors, which `continue_generation` settles", "full")
ALONE = Deed("is an update of its own, of the tensors that it names", "partial", "this call")
OPEN_SUM = Deed(
    "opens an update of all tensors; the call that completes it settles it, and a failure drops it",
    "full",
    "the call that completes it",
)
JOIN_SUM = Deed(
    "joins the open update; the call that completes it settles it, and a failure drops it",
    settles="the call that completes it",
)


def _rows(relation: Relation, paused: Deed, running: Deed, empty: Deed) -> dict[tuple[Engine, Relation], Deed]:
    return {(Engine.PAUSED, relation): paused, (Engine.RUNNING, relation): running, (Engine.EMPTY, relation): empty}


RULE: Mapping[tuple[Engine, Relation], Deed] = MappingProxyType(
    #                          PAUSED   RUNNING  EMPTY
    _rows(Relation.FIRST, OPEN, ALONE, OPEN_SUM)
    | _rows(Relation.LOST, OPEN, REFUSE, REFUSE)
    | _rows(Relation.NEW_PAUSE, OPEN, ALONE, OPEN_SUM)
    | _rows(Relation.JOINED, JOIN, JOIN, JOIN_SUM)
    | _rows(Relation.SAME, JOIN, JOIN, JOIN_SUM)
    | _rows(Relation.BEGUN, JOIN, JOIN, JOIN)
    | _rows(Relation.FOREIGN, REFUSE, REFUSE, REFUSE)
)
"""The rule for calls that bring tensors, complete.  It is what makes updates of clients without begin and end."""


# --- one update ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class UpdateTarget:
    """The weights that an update refreshes.  The storages, the known content and `torn` are the target's own.

    `placed(coverage)`, called when an update opens: the weights in which it is staged.  `quantised`: see `Intake`.
    `torn`: why the content is neither the old version nor a new one, until a complete refresh is committed.
    """

    name: str
    weights: LogicalWeights
    placed: Callable[[Coverage], LogicalWeights]
    quantised: HeldFormats
    content: ContentBook = field(init=False)
    torn: str | None = None

    def __post_init__(self) -> None:
        self.content = ContentBook(self.weights.metas())


@dataclass(frozen=True)
class CommitResult:
    """The version that one commit published."""

    weight_version: str | None  # None: the sender named none
    names: list[str]  # logical tensors written
    num_bytes: int
    seconds: float  # time that the step thread spent
    digests: Digests  # of the whole content now, as far as they are known
    update: WeightUpdate
    staging_seconds: float = 0.0  # from its opening to its commit


@dataclass(eq=False)
class WeightUpdate:
    """One update.  `transaction`: its tensors, and the version that they will be.

    `id` None: it has no name.  `is_bound`: every call must carry the id.  `is_implicit`: it was opened for a client
    that sends no begin and no end, after `pause` pauses.  `prepared_s`, `receiving_s`: see `EndedUpdate`.
    `counts_tensors`: it was not announced as a part of the tensors, so if not all came, its label states how many.
    """

    target: UpdateTarget
    transaction: WeightTransaction
    lease: Lease
    id: str | None = None
    is_bound: bool = False
    is_implicit: bool = False
    pause: int = 0
    prepared_s: float | None = None
    counts_tensors: bool = False
    receiving_s: float = field(default=0.0, init=False)

    # --- whose calls ---------------------------------------------------------------------------------------------

    @property
    def way_out(self) -> str:
        """The advice to a caller that this update keeps out: the end of the message that refuses its call."""
        end = "settle it with continue_generation" if self.is_implicit else "end it"
        with_id = f" with update_id {self.id!r}" if self.is_bound else ""
        return f"({self.lease}): {end}, or drop it with abort_weight_update{with_id}"

    def foreign(self, weight_version: str | None) -> TransactionStateError | None:
        """Return why a call without an id is not of this update; None where it is."""
        if self.is_bound:
            return TransactionStateError(f"the open weight update takes only calls with its id {self.way_out}")
        return self._other_version(weight_version)

    def is_left(self, pause: int) -> bool:
        """Return whether a call without an id, after `pause` pauses, comes from a client that has started anew."""
        return self.is_implicit and not self.is_bound and self.pause != pause

    def admit(self, update_id: str | None) -> None:
        """Note a call of this update."""
        self.is_bound = self.is_bound or update_id is not None

    def _other_version(self, weight_version: str | None) -> TransactionStateError | None:
        """Return why a bucket of this label is not of the update's version; None if it is, or one has no label."""
        mine = self.transaction.weight_version
        if mine == weight_version or None in (mine, weight_version):
            return None
        return TransactionStateError(
            f"the bucket has version {weight_version!r}, the open weight update of {mine!r} {self.way_out}"
        )

    # --- its tensors ---------------------------------------------------------------------------------------------

    def receive(
        self,
        source: BucketSource,
        weight_version: str | None,
        cast: bool,
        max_bytes: int,
        pace: Callable[[float], None] | None,
    ) -> None:
        """Receive the tensors of one call of this update.  Every error fails the update.

        Raises `TransactionStateError` (failed before, or another version than before), and what the source and
        `WeightTransaction.receive` raise.
        """
        start, transaction = time.perf_counter(), self.transaction
        wrong: WeightSyncError | None = None
        if pace is not None:
            pace(0.0)
        try:
            metas = source.announce(max_bytes)
            try:
                other = self._other_version(weight_version)
                if other is not None and transaction.state is TransactionState.OPEN:
                    raise other
                transaction.announce(metas, cast)
            except WeightSyncError as error:
                wrong = error  # known before it is received
            deliver(source, partial(transaction.receive, cast=cast), wrong, pace)
        except Exception as error:
            self.fail(str(error))
            source.refuse(str(error))
            raise
        finally:
            self.receiving_s += time.perf_counter() - start
        if weight_version is not None:
            transaction.weight_version = weight_version

    def fail(self, reason: str) -> None:
        """Fail: it cannot be verified any more."""
        self.transaction.fail(reason)
        self.target.torn = self.transaction.torn or self.target.torn

    def abort(self, reason: str) -> None:
        """Put the target back as it was before the update, unless a failed commit has done so."""
        if self.transaction.state is not TransactionState.ABORTED:
            self.transaction.abort(reason)
        self.target.torn = self.transaction.torn or self.target.torn

    def commit(self, vote: Callable[[bool], bool]) -> CommitResult:
        """Write the verified tensors into the target, all or nothing.  Raises as `WeightTransaction.commit`."""
        transaction, target, start = self.transaction, self.target, time.perf_counter()
        staging_s = transaction.age_s
        names = transaction.commit(vote)
        seconds = time.perf_counter() - start
        if len(names) == len(target.weights.metas()):
            target.torn = None
        target.content.note(transaction.contents)
        return CommitResult(
            transaction.weight_version, names, transaction.num_bytes, seconds, transaction.digests, self, staging_s
        )

    # --- its state -----------------------------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome:
        """The outcome so far; callable on any thread."""
        verified = self.transaction.state is TransactionState.VERIFIED
        return Outcome("verified" if verified else "open", self.transaction.failure)

    @property
    def num_received(self) -> int:
        return int(self.transaction.status()["received"])

    @property
    def num_missing(self) -> int:
        """The number of tensors that were announced (without a manifest: all of the target's) and have not come."""
        return int(self.transaction.status()["missing"])

    def status(self) -> dict[str, Any]:
        """Return counts, and the first names."""
        lease = {"lease_s": self.lease.seconds, "lease_left_s": self.lease.left_s}
        identity = {"update_id": self.id, "bound": self.is_bound, "implicit": self.is_implicit}
        return self.transaction.status() | lease | identity

    def ended(self, kind: Literal["lost", "aborted"], reason: str, *, steps_held: bool) -> EndedUpdate:
        """Return the record of an end without a commit."""
        transaction = self.transaction
        return EndedUpdate(
            update_id=self.id,
            kind=kind,
            weight_version=transaction.weight_version,
            reason=transaction.failure or reason,
            num_tensors=self.num_received,
            num_bytes=transaction.num_bytes,
            prepared_s=self.prepared_s,
            staging_s=transaction.age_s,
            receiving_s=self.receiving_s,
            steps_held=steps_held,
        )

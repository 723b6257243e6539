"""`WeightUpdate`: one weight update, from its opening to its end.  To understand refreshes, read this file first.

     begin, or a call without begin (`update_rule.py`)
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

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from weight_sync.content import ContentBook, Digests, TensorTable
from weight_sync.errors import TransactionStateError, WeightSyncError
from weight_sync.held_format import HeldFormats
from weight_sync.in_model import Apart
from weight_sync.ledger import Coverage
from weight_sync.plan import KnownCalls, Planner
from weight_sync.receivers.base import BucketSource, KnownCall, deliver
from weight_sync.tensor_meta import LogicalWeights
from weight_sync.transaction import TransactionState, WeightTransaction
from weight_sync.waiting import Lease

_REMEMBERED = 256
_ENDS_REMEMBERED = 16
_CALLS_KEPT = 4
"""Calls are kept with this many times the tensors of the target, all together."""


# --- how updates end -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EndedUpdate:
    """The end of one update; times in seconds.  `weight_epoch`: the one that it published, `reason`: why it did not.

    `prepared_s`: before its opening, by the sender.  `staging_s`: from its opening until its commit began, or it
    was dropped; `receiving_s` of them in calls that bring tensors, and in the rest it waited for the sender.
    `steps_held`: no step ran while its tensors came.  `stall_s`: of the step thread in the commit.  `ended_at`: since
    1970.
    """

    update_id: str | None
    kind: Literal["committed", "lost", "aborted"]
    weight_version: str | None
    weight_epoch: int | None = None
    reason: str | None = None
    num_tensors: int
    num_bytes: int
    prepared_s: float | None = None
    staging_s: float
    receiving_s: float = 0.0
    stall_s: float = 0.0
    steps_held: bool
    ended_at: float = field(default_factory=time.time)
    target: str = "model"


@dataclass(frozen=True)
class UpdateFailure:
    """Why a weight update was not published.  `time`: seconds since 1970."""

    reason: str
    weight_version: str | None
    time: float


@dataclass(frozen=True)
class Outcome:
    """The state of an update; `reason`: why it failed.  `answer`: the reply that the sender of a committed one got.

    `lost`: dropped, and not in answer to a call.
    """

    kind: Literal["open", "verified", "committed", "lost", "aborted", "unknown"]
    reason: str | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)


# --- one update ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class UpdateTarget:
    """The weights that an update refreshes.  The storages, the known content, the plans and `torn` are its own.

    `placed(coverage)`, called when an update opens: the weights in which it is staged.  `quantised`: see `Intake`.
    `apart`: of weights that nothing reads before the commit; None: steps read them.
    `torn`: why the content is neither the old version nor a new one, until a complete refresh is committed.
    """

    name: str
    weights: LogicalWeights
    placed: Callable[[Coverage], LogicalWeights]
    quantised: HeldFormats
    apart: Apart | None = None
    content: ContentBook = field(init=False)
    planner: Planner = field(init=False)
    known_calls: KnownCalls[KnownCall] = field(init=False)
    torn: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        table = TensorTable(self.weights.metas())
        self.content = ContentBook(table)
        self.planner = Planner(table, self.quantised)
        self.known_calls = KnownCalls(_CALLS_KEPT * len(table))


@dataclass(frozen=True)
class CommitResult:
    """The version that one commit published."""

    weight_version: str | None  # None: the sender named none
    num_tensors: int  # logical tensors written
    num_bytes: int
    seconds: float  # time that the step thread spent
    digests: Digests  # of the whole content now, as far as they are known
    update: WeightUpdate
    staging_seconds: float = 0.0  # from its opening to its commit

    @property
    def names(self) -> list[str]:
        """The names of the logical tensors written."""
        return self.update.transaction.received


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
        own = self.transaction.weight_version
        if own == weight_version or None in (own, weight_version):
            return None
        mine = f"the open weight update of {own!r} {self.way_out}"
        return TransactionStateError(f"the bucket has version {weight_version!r}, {mine}")

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
                transaction.announce(metas, cast, source.layouts, per_rank=source.is_per_rank)
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

    def abort(self, reason: str = "the weight update was aborted") -> None:
        """Put the target back as it was before the update, unless a failed commit has done so."""
        if self.transaction.state is not TransactionState.ABORTED:
            self.transaction.abort(reason)
        self.target.torn = self.transaction.torn or self.target.torn

    def failure_text(self, reason: str | None) -> str:
        """Return a reason of its failure, and what else is known of that."""
        message = reason or ""
        for more in (self.transaction.failure, self.transaction.torn):
            if more is not None and more not in message:
                message = more if message in more else f"{message}; {more}"
        return message

    def commit(self, vote: Callable[[bool], bool]) -> CommitResult:
        """Write the verified tensors into the target, all or nothing.  Raises as `WeightTransaction.commit`."""
        transaction, target, start = self.transaction, self.target, time.perf_counter()
        staging_s = transaction.age_s
        transaction.commit(vote)
        seconds, num_tensors = time.perf_counter() - start, transaction.num_received
        if num_tensors == len(target.weights.metas()):
            target.torn = None
        target.content.note(transaction.contents)
        return CommitResult(
            weight_version=transaction.weight_version,
            num_tensors=num_tensors,
            num_bytes=transaction.num_bytes,
            seconds=seconds,
            digests=transaction.digests,
            update=self,
            staging_seconds=staging_s,
        )

    # --- its state -----------------------------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome:
        """The outcome so far; callable on any thread."""
        verified = self.transaction.state is TransactionState.VERIFIED
        return Outcome("verified" if verified else "open", self.transaction.failure)

    @property
    def num_received(self) -> int:
        return self.transaction.num_received

    @property
    def num_missing(self) -> int:
        """The number of tensors that were announced (without a manifest: all of the target's) and have not come."""
        return self.transaction.num_missing

    def status(self) -> dict[str, Any]:
        """Return counts, and the first names."""
        lease = {"lease_s": self.lease.seconds, "lease_left_s": self.lease.left_s}
        identity = {"update_id": self.id, "bound": self.is_bound, "implicit": self.is_implicit}
        identity["target"] = self.target.name
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
            target=self.target.name,
        )


# --- the ones that ended ---------------------------------------------------------------------------------------------


class UpdateBook:
    """The record of the last updates.  `loss`: why the last one was lost, until a sender starts anew.

    A *loss* is an update, or a pause in which one could have been, that ended without a commit and not by a call that
    carried its id: its lease expired, its pause timed out, a call of unknown origin ended it.  Its sender may go on
    sending buckets.  Outside of an update each of them would be one of its own: a mixture of two versions.

    `last_failure`: of the last update that failed, until one is committed.  `ended`: the last that ended, oldest first.
    """

    def __init__(self) -> None:
        self.ended: deque[EndedUpdate] = deque(maxlen=_ENDS_REMEMBERED)
        self.loss: str | None = None
        self.last_failure: UpdateFailure | None = None
        self._is_reported = True
        self._outcomes: dict[str, Outcome] = {}

    def note(self, update_id: str | None, outcome: Outcome) -> None:
        """Remember the outcome of an update that is over."""
        if update_id is not None:
            self._outcomes[update_id] = outcome
        if len(self._outcomes) > _REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]

    def note_drop(self, ended: EndedUpdate, reason: str) -> None:
        """Remember an update that ended without a commit, for `reason`."""
        self.note(ended.update_id, Outcome(ended.kind, reason))
        self.ended.append(ended)

    def outcome(self, update_id: str) -> Outcome:
        """Return the outcome of an update that is over; `unknown` for an id that was never used, or too long ago."""
        return self._outcomes.get(update_id, Outcome("unknown"))

    def note_failure(self, reason: str, weight_version: str | None) -> None:
        self.last_failure = UpdateFailure(reason, weight_version, time.time())

    def record_loss(self, reason: str, *, reported: bool) -> None:
        """Record a loss.  `reported`: in the answer to a call, which may be its sender's."""
        self.loss, self._is_reported = reason, reported

    def clear_loss(self) -> None:
        """Forget the loss, as a sender starts anew: what comes from now on is taken for its own."""
        self.loss, self._is_reported = None, True

    def report_loss(self) -> str | None:
        """Return the loss, if no answer has reported it yet; the caller's answer does."""
        loss = None if self._is_reported else self.loss
        self._is_reported = True
        return loss

    def loss_error(self) -> TransactionStateError | None:
        """Return why a call outside of an update cannot be an update of its own; None where nothing was lost."""
        if self.loss is None:
            return None
        self.report_loss()
        return TransactionStateError(
            f"an earlier weight update was dropped ({self.loss}), and this call may belong to it: "
            "begin, pause or abort first"
        )

    def nothing_open(self, verb: str) -> TransactionStateError:
        """Return the error of a call that needs an open update, where there is none."""
        self.report_loss()
        last = self.loss or (self.last_failure.reason if self.last_failure is not None else None)
        because = "" if last is None else f"; the last one failed: {last}"
        return TransactionStateError(f"cannot {verb}: no weight update is open{because}")

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

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from weight_sync.content import Digests
from weight_sync.errors import CommitError, CoverageError, TransactionStateError, WeightSyncError
from weight_sync.rank_parts import Exchange
from weight_sync.receivers.base import BucketSource, deliver
from weight_sync.sorter import Bucket, Sorter
from weight_sync.tensor_meta import TensorMeta
from weight_sync.transaction import COUNTED_FIELDS, NAME_FIELDS, NAMES_SHOWN, TransactionState, WeightTransaction
from weight_sync.update_book import EndedUpdate, Outcome
from weight_sync.update_target import Beside, UpdateTarget
from weight_sync.waiting import Lease


@dataclass(frozen=True)
class CommitResult:
    """The version that one commit published."""

    weight_version: str | None  # None: the sender named none
    num_tensors: int  # logical tensors of the first target that were written
    num_bytes: int
    seconds: float  # time that the step thread spent
    digests: Digests  # of the whole content now, as far as they are known
    update: WeightUpdate
    staging_seconds: float = 0.0  # from its opening to its commit

    @property
    def names(self) -> list[str]:
        """The names of the logical tensors of the first target that were written."""
        return self.update.transaction.received


@dataclass(eq=False)
class WeightUpdate:
    """One update of `target`, and of further targets.  `transaction`: the tensors and the version to be.

    All targets are committed, or none.  `sorter`: knows whose tensors come; None where there is one target.
    `id` None: it has no name.  `is_bound`: every call must carry the id.  `is_implicit`: it was opened for a client
    that sends no begin and no end, after `pause` pauses.  `prepared_s`, `receiving_s`: see `EndedUpdate`.
    `takes_first`: tensors of the first target come; False: it stays as it is, and only the label may change.
    `counts_tensors`: it was not announced as a part of the tensors, so if not all came, its label states how many.
    `has_begun_to_receive`: a call that brings tensors was begun.  All ranks carry out the same calls, so it is the same
    on all of them, whatever each call brings to a rank.
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
    takes_first: bool = True
    beside: Sequence[Beside] = ()
    sorter: Sorter | None = None
    receiving_s: float = field(default=0.0, init=False)
    has_begun_to_receive: bool = field(default=False, init=False)

    @property
    def targets(self) -> list[UpdateTarget]:
        return [self.target, *(each.target for each in self.beside)]

    @property
    def parts(self) -> Sequence[tuple[UpdateTarget, WeightTransaction]]:
        """The targets, each with its own tensors."""
        return [(self.target, self.transaction), *((each.target, each.transaction) for each in self.beside)]

    @property
    def is_apart(self) -> bool:
        """True if none of its tensors is written where steps read."""
        return self.target.apart is not None or not self.takes_first

    @property
    def transactions(self) -> list[WeightTransaction]:
        return [self.transaction, *(each.transaction for each in self.beside)]

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
        other = self.note_call(weight_version)
        if pace is not None:
            pace(0.0)
        try:
            metas = source.announce(max_bytes)
            try:
                if other is not None and transaction.state is TransactionState.OPEN:
                    raise other
                self._announce(metas, cast, source)
            except WeightSyncError as error:
                wrong = error  # known before it is received
            deliver(source, partial(self._take, cast=cast), wrong, pace)
        except Exception as error:
            self.fail(str(error))
            source.refuse(str(error))
            raise
        finally:
            self.receiving_s += time.perf_counter() - start

    def note_call(self, weight_version: str | None) -> TransactionStateError | None:
        """Note a call with tensors, before anything can go wrong on one rank alone.  Return why it is not of this.

        The label decides whose the next calls are, so all ranks note it, whatever becomes of the call.  A verified
        update takes no tensors any more, so a late call changes nothing of it.
        """
        other = self._other_version(weight_version)
        if self.is_verified:
            return other
        self.has_begun_to_receive = True
        if weight_version is not None and other is None:
            self.transaction.weight_version = weight_version
        return other

    def _announce(self, metas: Sequence[TensorMeta], cast: bool, source: BucketSource) -> None:
        """Check what is known of a bucket.  Raises as `WeightTransaction.announce`, and as `Sorter.metas`."""
        if self.sorter is None:
            self.transaction.announce(metas, cast, source.layouts, per_rank=source.is_per_rank)
            return
        parts, layouts = self.sorter.metas(metas), self.sorter.layouts(source.layouts)
        self.transaction.announce(parts[0], cast, layouts[0], per_rank=source.is_per_rank)
        for number, each in enumerate(self.beside, 1):
            each.transaction.announce(parts[number], cast, layouts[number])

    def _take(self, bucket: Bucket, cast: bool) -> None:
        """Stage one bucket.  Errors in other targets are found before the model may be written to."""
        if self.sorter is None:
            self.transaction.receive(bucket, cast)
            return
        mine, *others = self.sorter.bucket(bucket)
        for each, part in reversed([*zip(self.beside, others, strict=True)]):
            if part is not None:
                each.may_lack = False
                each.transaction.receive(part, cast)
        if mine is not None:
            self.transaction.receive(mine, cast)

    def verify(self, exchange: Exchange) -> None:
        """Verify the tensors of all targets.

        Raises as `WeightTransaction.verify`, and `CoverageError` where some ranks alone have tensors of a target.
        """
        self._leave_out(exchange)
        for each in self.beside:
            each.transaction.verify()
        self.transaction.verify(exchange)

    def _leave_out(self, exchange: Exchange) -> None:
        """End the parts of optional targets of which no tensor has come to any rank."""
        optional = [each for each in self.beside if each.is_optional]
        lacks = bytes(each.may_lack for each in optional)
        differs = optional and any(other != lacks for other in exchange(lacks))
        if differs and self.transaction.failure is None:
            names = ", ".join(each.target.name for each in optional)
            raise CoverageError(f"tensors of the {names} came to some ranks, and not to all")
        for each in optional:
            if each.may_lack:
                each.transaction.abort("no tensor of it came")
        self.beside = [each for each in self.beside if not each.may_lack]

    def fail(self, reason: str) -> None:
        """Fail: it cannot be verified any more."""
        for transaction in self.transactions:
            transaction.fail(reason)
        self._note_torn()

    def spoil(self, reason: str, weight_version: str | None, update_id: str | None) -> None:
        """Fail, as what one of its calls brings cannot be read on this rank."""
        self.admit(update_id)
        self.note_call(weight_version)
        self.fail(reason)

    def abort(self, reason: str = "the weight update was aborted") -> None:
        """Put the targets back as they were before the update, unless a failed commit has done so."""
        for transaction in self.transactions:
            if transaction.state is not TransactionState.ABORTED:
                transaction.abort(reason)
        self._note_torn()

    def _note_torn(self) -> None:
        for target, transaction in self.parts:
            target.torn = transaction.torn or target.torn

    def failure_text(self, reason: str | None) -> str:
        """Return a reason of its failure, and what else is known of that."""
        message = reason or ""
        for more in (self.transaction.failure, self.transaction.torn):
            if more is not None and more not in message:
                message = more if message in more else f"{message}; {more}"
        return message

    def check_committable(self) -> None:
        """Raise `TransactionStateError` unless all is verified."""
        for transaction in self.transactions:
            transaction.check_committable()

    def commit(self, vote: Callable[[bool], bool]) -> CommitResult:
        """Write the verified tensors into all targets, all or nothing.  Raises as `WeightTransaction.commit`."""
        transaction, start = self.transaction, time.perf_counter()
        staging_s = transaction.age_s
        _commit_all(self.transactions, vote)
        seconds = time.perf_counter() - start
        for target, part in self.parts:
            if part.num_received == len(target.weights.metas()):
                target.torn = None
            target.content.note(part.contents)
        return CommitResult(
            weight_version=transaction.weight_version,
            num_tensors=transaction.num_received,
            num_bytes=self.num_bytes,
            seconds=seconds,
            digests=transaction.digests,
            update=self,
            staging_seconds=staging_s,
        )

    def close(self) -> None:
        """Release the memory that staging took, when it is committed; on any thread."""
        for transaction in self.transactions:
            transaction.close()

    # --- its state -----------------------------------------------------------------------------------------------

    @property
    def may_have_written(self) -> bool:
        """True if a bucket may have been written on any rank, and was not taken back.

        Counts of tensors do not tell: a part is written before its tensor counts, and perhaps on other ranks alone.
        """
        is_live = self.transaction.state in (TransactionState.OPEN, TransactionState.VERIFIED)
        return is_live and self.has_begun_to_receive

    @property
    def outcome(self) -> Outcome:
        """The outcome so far; callable on any thread."""
        return Outcome("verified" if self.is_verified else "open", self.transaction.failure)

    @property
    def is_verified(self) -> bool:
        return self.transaction.state is TransactionState.VERIFIED

    @property
    def num_received(self) -> int:
        return sum(transaction.num_received for transaction in self.transactions)

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors that came."""
        return sum(transaction.num_bytes for transaction in self.transactions)

    @property
    def num_missing(self) -> int:
        """The number of tensors that were announced (without a manifest: all of the target's) and have not come."""
        of_first = self.transaction.num_missing if self.takes_first else 0
        return of_first + sum(it.transaction.num_missing for it in self.beside if not it.may_lack)

    @property
    def target_names(self) -> str:
        coming = self.targets if self.takes_first else self.targets[1:]
        return ", ".join(target.name for target in coming)

    def status(self) -> dict[str, Any]:
        """Return counts, and the first names."""
        lease = {"lease_s": self.lease.seconds, "lease_left_s": self.lease.left_s}
        identity = {"update_id": self.id, "bound": self.is_bound, "implicit": self.is_implicit}
        identity["target"] = self.target_names
        found = self.transaction.status()
        if not self.takes_first:
            found |= {"missing": 0, "missing_names": []}
        others = [each.transaction.status() for each in self.beside if not each.may_lack]
        for other, field_name in itertools.product(others, COUNTED_FIELDS):
            found[field_name] += other[field_name]
        return found | {name: found[name][:NAMES_SHOWN] for name in NAME_FIELDS} | lease | identity

    def ended(self, kind: Literal["lost", "aborted"], reason: str, *, steps_held: bool) -> EndedUpdate:
        """Return the record of an end without a commit."""
        transaction = self.transaction
        return EndedUpdate(
            update_id=self.id,
            kind=kind,
            weight_version=transaction.weight_version,
            reason=transaction.failure or reason,
            num_tensors=self.num_received,
            num_bytes=self.num_bytes,
            prepared_s=self.prepared_s,
            staging_s=transaction.age_s,
            receiving_s=self.receiving_s,
            steps_held=steps_held,
            target=self.target_names,
        )


def _commit_all(transactions: Sequence[WeightTransaction], vote: Callable[[bool], bool]) -> None:
    """Commit all transactions or none: all are written, then there is one vote.

    Raises as `WeightTransaction.commit`; `CommitError` states the failure of this rank, if it was one.
    """
    first, *rest = transactions
    failures: list[CommitError] = []

    def with_the_rest(mine: bool) -> bool:
        if not rest:
            return vote(mine)
        try:
            _commit_all(rest, lambda theirs: vote(mine and theirs))
        except CommitError as error:
            failures.append(error)
        return not failures

    try:
        first.commit(with_the_rest)
    except CommitError as error:
        restored = error.restored and all(failure.restored for failure in failures)
        told = next((one for one in (error, *failures) if one.__cause__ is not None or not one.restored), error)
        raise CommitError(str(told), restored=restored) from told.__cause__

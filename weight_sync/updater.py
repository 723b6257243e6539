"""`WeightUpdater`: the one open transaction of one rank, and the order of steps.

    I/O side (blocking, one worker thread)     begin | open_implicit  receive*  verify | abort
    step side (the thread that runs forwards)  commit

Unless the staging mode holds the steps, the I/O side never touches the serving weights.  A bucket that is refused for
any reason fails the open transaction for good.  Where a sender broadcasts before it can learn of a refusal, the refused
bucket is still received, and discarded.  An open transaction has a lease, renewed and expired on the step side, where
all ranks share one clock.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from weight_sync.content import ContentBook
from weight_sync.errors import CommitError, TransactionStateError, WeightSyncError
from weight_sync.held_format import AS_SENT, HeldFormats
from weight_sync.held_memory import HeldMemory
from weight_sync.loading import Coverage
from weight_sync.open_update import OpenUpdate
from weight_sync.process_group import WeightUpdateGroups
from weight_sync.rank_parts import Exchange, alone
from weight_sync.receivers.base import BucketSource, Receiver, deliver
from weight_sync.staging import HOLDING_MODES, StagingMode
from weight_sync.tensor_meta import LogicalWeights
from weight_sync.transaction import STATUS_FIELDS, Manifest, TransactionState, WeightTransaction, new_staging
from weight_sync.update_book import CommitResult, Outcome
from weight_sync.waiting import DEFAULT_LEASE_S, Lease, Patience

_MIN_CALL_BYTES = 64 << 20


class WeightUpdater(OpenUpdate):
    """`device`: where the weights live.  `timeout_s`: deadline of a rendezvous and of one bucket.

    `vote(mine) -> all`: agreement of all ranks of the engine, called once in `verify`, on the I/O side; it has its own
    deadline.  `commit_vote`: the same on the step side, called once in `commit`; by default `vote`.  `exchange`: what
    each of them brings, on the I/O side.  `max_call_bytes`: of one call, by default twice the model's.  `staging`:
    where tensors are until the commit; `journal_dir`: see `new_staging`; `memory`: what they take, by default given
    back after each update.  `pace`: see `deliver`.  `clock`: monotonic, for leases.  `target(coverage)`, called when a
    transaction opens: where it is staged, if that is not where `weights` lie now.  `quantised`: see `Intake`.
    `cast`: of updates that do not say, see `WeightTransaction`.

    `torn`: why the model is neither the old version nor a new one, until a complete refresh is committed.
    """

    def __init__(
        self,
        weights: LogicalWeights,
        *,
        device: torch.device | str,
        timeout_s: float,
        vote: Callable[[bool], bool],
        commit_vote: Callable[[bool], bool] | None = None,
        exchange: Exchange = alone,
        target: Callable[[Coverage], LogicalWeights] | None = None,
        staging: StagingMode = "host",
        journal_dir: str | None = None,
        memory: HeldMemory | None = None,
        rank: int = 0,
        ranks: int = 1,
        pace: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_call_bytes: int | None = None,
        quantised: HeldFormats = AS_SENT,
        cast: bool = False,
    ) -> None:
        super().__init__()
        self.patience = Patience()
        self._device, self._timeout_s, self._held = torch.device(device), timeout_s, memory or HeldMemory()
        self.groups = WeightUpdateGroups(self._device, timeout_s, self.patience)
        self.rank, self.ranks, self._pace = rank, ranks, pace
        self.weights = weights
        twice = 2 * sum(meta.nbytes for meta in weights.metas().values())
        self._max_call_bytes = max_call_bytes or max(twice, _MIN_CALL_BYTES)
        self._vote, self._commit_vote = vote, commit_vote or vote
        self.exchange = exchange
        self._target = target or (lambda _: weights)
        self.content = ContentBook(weights.metas())
        self._staging, self._journal_dir = staging, journal_dir
        self._clock, self.quantised, self._cast = clock, quantised, cast
        self.torn: str | None = None

    def close(self) -> None:
        """Leave all groups and drop the open transaction."""
        self.groups.close()
        if self._transaction is not None:
            self.abort()

    # --- transaction, I/O side ---------------------------------------------------------------------------------

    def begin(
        self,
        weight_version: str | None = None,
        coverage: Coverage = "full",
        manifest: Manifest | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        *,
        update_id: str | None = None,
        bound: bool = False,
        is_implicit: bool = False,
        cast: bool | None = None,
    ) -> None:
        """Open a transaction.  `bound`: every call must carry `update_id`.  `is_implicit`: see `open_implicit`.

        `cast`: see `WeightTransaction`; None: the updater's.

        Raises `TransactionStateError` if one is open, or if the id was used before, `WeightRequestError`, and what
        `WeightTransaction` raises.
        """
        self.require_none_open()
        self._held.await_release(self._timeout_s)
        if update_id is not None and self.outcome(update_id).kind != "unknown":
            raise TransactionStateError(f"{self.foreign(update_id)}; begin with a new update_id")
        lease, target = Lease(lease_s, self._clock), self._target(coverage)
        staging = new_staging(target, self._staging, self._journal_dir, self._held.shadows, self._device)
        flags: dict[str, Any] = {"is_implicit": is_implicit, "update_id": update_id, "is_bound": bound}
        flags |= {"quantised": self.quantised, "cast": self._cast if cast is None else cast}
        self._transaction = WeightTransaction(target, weight_version, coverage, manifest, staging, lease, **flags)
        if not is_implicit:
            self.book.clear_loss()

    def open_implicit(
        self, coverage: Coverage = "partial", update_id: str | None = None, cast: bool | None = None
    ) -> None:
        """Open a transaction on behalf of a client that sends no begin and no end.  Raises as `begin`."""
        self.begin(coverage=coverage, update_id=update_id, is_implicit=True, cast=cast)

    def turn_away(self, source: BucketSource, refusal: Exception) -> NoReturn:
        """Receive one call as far as its sender needs that, into nothing.  Raises `refusal`, or what else is wrong."""
        try:
            source.announce(self._max_call_bytes)
            deliver(source, lambda _: None, refusal)
        except Exception as error:
            source.refuse(str(error))
            raise
        raise refusal

    def receive(
        self,
        source: BucketSource,
        weight_version: str | None = None,
        update_id: str | None = None,
        cast: bool | None = None,
    ) -> None:
        """Receive one call's tensors into the open transaction.  `cast`: true also where that began without.

        Raises `TransactionStateError` (nothing open, failed before, another version than before, or not of the open
        transaction), and what the source and `WeightTransaction.receive` raise.  Every error of a call that is of the
        open transaction fails it.
        """
        transaction, refusal = self._transaction, self.foreign(update_id, weight_version)
        if refusal is not None or transaction is None:
            self.turn_away(source, refusal or self.book.nothing_open("receive"))
        transaction.is_bound = transaction.is_bound or update_id is not None
        wrong: WeightSyncError | None = None
        casts = source.casts or bool(cast)
        try:
            metas = source.announce(self._max_call_bytes)
            try:
                transaction.announce(metas, weight_version, casts)
            except WeightSyncError as error:
                wrong = error  # known before it is received
            deliver(source, functools.partial(transaction.receive, cast=casts), wrong, self._pace)
        except Exception as error:
            transaction.fail(str(error))
            self._note_failure(transaction, transaction.failure)
            source.refuse(str(error))
            raise
        if weight_version is not None:
            transaction.weight_version = weight_version

    def verify(self, update_id: str | None = None) -> None:
        """Check the open transaction here and on all ranks; it can be committed afterwards.

        Raises `CoverageError`, `ContentError`, `TransactionStateError`; the transaction is dropped then, and the next
        `begin` is free.
        """
        transaction = self.admit(update_id, "verify")
        if transaction.state is TransactionState.VERIFIED:
            raise TransactionStateError("cannot verify: the weight update is already verified")
        failure: Exception | None = None
        try:
            transaction.verify()
        except Exception as error:
            failure = error
        try:
            if not self._vote(failure is None):
                failure = failure or TransactionStateError("another rank could not verify the weight update")
        except BaseException as error:
            self.drop(str(failure or error), reported=True, by_sender=update_id is not None)
            raise
        if failure is not None:
            self.drop(str(failure), reported=True, by_sender=update_id is not None)
            raise failure
        transaction.digests = self.content.digests_after(transaction.contents)

    def fail(self, reason: str) -> None:
        """Fail the open transaction, which cannot be verified: another rank failed to receive a bucket."""
        self._require_transaction("fail").fail(reason)

    def abort(self, update_id: str | None = None) -> None:
        """Drop the open transaction on request: its sender's, if the call carries its id.

        Raises `TransactionStateError` if none is open; a call without an id then clears a recorded loss.
        """
        try:
            self.admit(update_id, "abort")
        except TransactionStateError:
            if update_id is None and not self.is_open:
                self.book.clear_loss()
            raise
        transaction = self._close("it was aborted", reported=True, by_sender=update_id is not None)
        transaction.abort()
        self.torn = transaction.torn or self.torn

    def drop(self, reason: str, *, reported: bool = False, by_sender: bool = False) -> None:
        """Drop the open transaction because it failed; `status` keeps the reason.  Raises as `abort`.

        `reported`: in the answer to a call; `by_sender`: to one that carries its id.
        """
        transaction = self._close(reason, reported=reported, by_sender=by_sender)
        transaction.abort(reason)
        self._note_failure(transaction, reason)

    def expire(self) -> bool:
        """Drop the open transaction if its lease has run out; whether it did."""
        transaction = self._transaction
        if transaction is None or not transaction.lease.expired:
            return False
        came = f"after {len(transaction.received)} tensors, {len(transaction.missing)} were missing"
        self.drop(f"the lease of {transaction.lease.seconds:g} s ran out {came}")
        return True

    # --- transaction, step side --------------------------------------------------------------------------------

    def commit(self) -> CommitResult:
        """Write the verified transaction into the serving weights, all or nothing.

        Raises `TransactionStateError` unless verified (nothing changes), `CommitError` (the transaction is dropped; its
        `restored` states whether the old weights are back); both on all ranks, as one that has nothing to commit votes
        all the same.  Anything else that it raises leaves the commit in doubt: serving must end.
        """
        try:
            transaction = self._require_transaction("commit")
            transaction.check_committable()
        except TransactionStateError:
            self._commit_vote(False)
            raise
        start, staging_s = time.perf_counter(), transaction.age_s
        try:
            names = transaction.commit(self._commit_vote)
        except CommitError as error:
            self._close(str(error), reported=True, by_sender=True)  # all of it had come: no bucket is on its way
            self._note_failure(transaction, str(error))
            raise
        seconds = time.perf_counter() - start
        self._held.release_in_background(transaction.close)
        self.book.note(transaction.update_id, Outcome("committed"))
        self._transaction, self.book.last_failure = None, None
        if len(names) == len(self.weights.metas()):
            self.torn = None
        self.content.note(transaction.contents)
        label, digests = transaction.weight_version, transaction.digests
        return CommitResult(label, names, transaction.num_bytes, seconds, digests, transaction.update_id, staging_s)

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def receiver(self) -> Receiver:
        """The receiver that the source of the next call is made with."""
        memory = self._held.receive if self.is_open else None
        # Whole: what is wrong with a bucket is found before any of it is written.
        return Receiver(self._device, self._timeout_s, self.groups, self.patience, memory, whole=self.holds_steps)

    @property
    def target(self) -> LogicalWeights:
        """The weights that the open transaction is staged for; `weights` unless it adopts a placement."""
        return self.weights if self._transaction is None else self._transaction.target

    @property
    def holds_steps(self) -> bool:
        """True if receiving writes into the model, so that no step may run from the first bucket to the end."""
        return self._staging in HOLDING_MODES

    @property
    def is_dirty(self) -> bool:
        """True if the model holds anything of the open transaction, on this rank or another: nothing may be sampled."""
        transaction = self._transaction
        if transaction is None:
            return False
        is_live = transaction.state in (TransactionState.OPEN, TransactionState.VERIFIED)
        return transaction.dirty or (self.holds_steps and is_live and bool(transaction.received))

    def status(self) -> dict[str, Any]:
        """Return the open transaction, its lease, the mode, and the last that failed; None for what there is not."""
        transaction, failure = self._transaction, self.book.last_failure
        data = dict.fromkeys(STATUS_FIELDS) if transaction is None else transaction.status()
        return data | {
            "open": transaction is not None,
            "implicit": self.is_implicit,
            "bound": self.is_bound,
            "update_id": self.open_id,
            "staging": self._staging,
            "last_failure": None if failure is None else asdict(failure),
        }

    # --- helpers -----------------------------------------------------------------------------------------------

    def _close(self, reason: str, *, reported: bool, by_sender: bool) -> WeightTransaction:
        transaction = self._require_transaction("abort")
        self.book.note_drop(transaction, "aborted" if reported else "lost", reason, steps_held=self.holds_steps)
        self._transaction = None
        self._held.end()
        if not by_sender:
            self.book.record_loss(reason, reported=reported)
        return transaction

    def _note_failure(self, transaction: WeightTransaction, reason: str | None) -> None:
        message = reason or ""
        for more in (transaction.failure, transaction.torn):
            if more is not None and more not in message:
                message = more if message in more else f"{message}; {more}"
        if message:
            self.book.note_failure(message, transaction.weight_version)
        self.torn = transaction.torn or self.torn

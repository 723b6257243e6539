"""`WeightUpdater`: the updates of one rank, of which at most one is open, and the order of steps.

    I/O side (blocking, one worker thread)     begin | open_implicit  receive*  verify | abort
    step side (the thread that runs forwards)  commit

`update.py` has what belongs to one update, and its states.  This file has what all of them share: where they are
staged, how ranks vote, how the last ones ended.

Unless the staging mode holds the steps, the I/O side never touches the serving weights.  Where a sender broadcasts
before it can learn of a refusal, the refused bucket is still received, and discarded.  A lease starts on the I/O side,
at each rank's own time; the step side renews it after that call, and expires it: there all ranks share one clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

import torch

from weight_sync.errors import CommitError, LostVoteError, TransactionStateError
from weight_sync.held_format import AS_SENT, HeldFormats
from weight_sync.held_memory import HeldMemory
from weight_sync.ledger import Coverage
from weight_sync.manifest import Entries, Manifest
from weight_sync.per_rank import PerRank
from weight_sync.rank_parts import Exchange, alone
from weight_sync.receivers.base import BucketSource, Receiver, deliver
from weight_sync.staging import HOLDING_MODES, StagingMode
from weight_sync.tensor_meta import LogicalWeights, Part
from weight_sync.transaction import STATUS_FIELDS, new_staging
from weight_sync.update import CommitResult, WeightUpdate
from weight_sync.update_book import Outcome, UpdateBook
from weight_sync.update_groups import WeightUpdateGroups
from weight_sync.update_rule import Relation
from weight_sync.update_target import Further, UpdateTarget
from weight_sync.waiting import DEFAULT_LEASE_S, Lease, Patience

_MIN_CALL_BYTES = 64 << 20


class WeightUpdater:
    """`device`: where the weights live.  `timeout_s`: deadline of a rendezvous and of one bucket.

    `vote(mine) -> all`: agreement of all ranks of the engine, called once in `verify`, on the I/O side; it has its own
    deadline.  `commit_vote`: the same on the step side, called once in `commit`; by default `vote`.  `exchange`: what
    each of them brings, on the I/O side.  `max_call_bytes`: of one call, by default twice the model's.  `staging`:
    where tensors are until the commit; `journal_dir`: see `new_staging`; `memory`: what they take, by default given
    back after each update.  `pace`: see `deliver`; called with 0 when a call begins.  `patience`: of waits for senders.
    `clock`: monotonic, for leases.  `target`, `quantised`: see `UpdateTarget`; by default `weights` as they lie, held
    as they come.  `cast`: of updates that do not say, see `WeightTransaction`.

    `update`: the one that is open.  `book`: how the last ones ended.  `model`: what they refresh; `per_rank`: by rank.
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
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_call_bytes: int | None = None,
        quantised: HeldFormats = AS_SENT,
        cast: bool = False,
    ) -> None:
        self.update: WeightUpdate | None = None
        self.book, self.patience = UpdateBook(), patience or Patience()
        self._device, self._timeout_s, self._held = torch.device(device), timeout_s, memory or HeldMemory()
        self.groups = WeightUpdateGroups(self._device, timeout_s, self.patience)
        self.rank, self.ranks, self._pace = rank, ranks, pace
        self.model = UpdateTarget("model", weights, target or (lambda _: weights), quantised)
        twice = 2 * sum(meta.nbytes for meta in weights.metas().values())
        self._max_call_bytes = max_call_bytes or max(twice, _MIN_CALL_BYTES)
        self._vote, self._commit_vote, self.exchange = vote, commit_vote or vote, exchange
        self._staging, self._journal_dir, self._clock, self._cast = staging, journal_dir, clock, cast
        self.per_rank = PerRank(self.model, rank, exchange)

    def close(self) -> None:
        """Leave all groups and drop the open update."""
        self.groups.close()
        if self.is_open:
            self.abort()

    # --- the open update, I/O side -----------------------------------------------------------------------------

    def begin(
        self,
        weight_version: str | None = None,
        coverage: Coverage = "full",
        manifest: Manifest | Entries | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        *,
        update_id: str | None = None,
        bound: bool = False,
        cast: bool | None = None,
        per_rank: bool = False,
        target: UpdateTarget | None = None,
        beside: Sequence[Further] = (),
        **facts: Any,
    ) -> None:
        """Open an update.  `bound`: every call must carry `update_id`.  `cast`: see `WeightTransaction`; None: the
        updater's.  `per_rank`: each rank is sent what it keeps.  `target`: what is refreshed; None: the model.
        Further targets are refreshed whole.  `facts`: more fields of `WeightUpdate`.

        Raises `TransactionStateError` if one is open, or the id was used; `WeightRequestError`, as `UpdateTarget.open`.
        """
        self.require_none_open()
        self._held.await_release(self._timeout_s)
        if update_id is not None and self.outcome(update_id).kind != "unknown":
            raise TransactionStateError(f"{self.foreign(update_id)}; begin with a new update_id")
        target, casts = target or self.model, self._cast if cast is None else cast
        where: dict[str, Any] = {"memory": self._held.shadows, "device": self._device}
        stage = partial(new_staging, mode=self._staging, journal_dir=self._journal_dir, **where)
        facts["beside"] = [each.open(partial(stage, memory=None), casts) for each in beside]
        stated: dict[str, Any] = {"weight_version": weight_version, "manifest": manifest, "cast": casts}
        transaction = target.open(stage, coverage, **stated, cover=self.per_rank.cover if per_rank else None)
        self.update = WeightUpdate(target, transaction, Lease(lease_s, self._clock), update_id, bound, **facts)
        if not self.update.is_implicit:
            self.book.clear_loss()

    def open_implicit(self, coverage: Coverage = "partial", update_id: str | None = None, **facts: Any) -> None:
        """Open an update for a client that sends no begin and no end.  Raises as `begin`."""
        self.begin(coverage=coverage, update_id=update_id, is_implicit=True, **facts)

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
        """Receive one call's tensors into the open update.  `cast`: true also where that began without.

        Raises `TransactionStateError` (nothing open, failed before, another version than before, or not of the open
        update), and what the source and `WeightTransaction.receive` raise.  Every error of a call of the open update
        fails it.
        """
        update, refusal = self.update, self.foreign(update_id, weight_version)
        if refusal is not None or update is None:
            self.turn_away(source, refusal or self.book.nothing_open("receive"))
        update.admit(update_id)
        try:
            casts = source.casts or bool(cast)
            update.receive(source, weight_version, casts, self._max_call_bytes, self._pace)
        except Exception:
            self._note_failure(update, update.transaction.failure)
            raise

    def verify(self, update_id: str | None = None, check: Callable[[WeightUpdate], None] = lambda _: None) -> None:
        """Check the open update here and on all ranks; it can be committed afterwards.

        Raises `CoverageError`, `ContentError`, `TransactionStateError`, and as `check`; the update is dropped then.
        """
        update = self.admit(update_id, "verify")
        if update.is_verified:
            raise TransactionStateError("cannot verify: the weight update is already verified")
        failure: Exception | None = None
        try:
            update.verify(self.exchange)
            check(update)
        except Exception as error:
            failure = error
        try:
            if not self._vote(failure is None):
                failure = failure or LostVoteError("another rank could not verify the weight update")
        except BaseException as error:
            self.drop(str(failure or error), reported=True, by_sender=update_id is not None)
            raise
        if failure is not None:
            self.drop(str(failure), reported=True, by_sender=update_id is not None)
            raise failure
        for each, part in update.parts:
            part.digests = each.content.digests_after(part.contents)

    def fail(self, reason: str) -> None:
        """Fail the open update, which cannot be verified: another rank failed to receive a bucket."""
        self._require_update("fail").fail(reason)

    def abort(self, update_id: str | None = None) -> None:
        """Drop the open update on request: its sender's, if the call carries its id.

        Raises `TransactionStateError` if none is open; a call without an id then clears a recorded loss.
        """
        try:
            self.admit(update_id, "abort")
        except TransactionStateError:
            if update_id is None and not self.is_open:
                self.book.clear_loss()
            raise
        self._close("it was aborted", reported=True, by_sender=update_id is not None).abort()

    def drop(self, reason: str, *, reported: bool = False, by_sender: bool = False) -> None:
        """Drop the open update because it failed; `status` keeps the reason.  Raises as `abort`.

        `reported`: in the answer to a call; `by_sender`: to one that carries its id.
        """
        update = self._close(reason, reported=reported, by_sender=by_sender)
        update.abort(reason)
        self._note_failure(update, reason)

    def expire(self) -> bool:
        """Drop the open update if its lease has run out; whether it did."""
        update = self.update
        if update is None or not update.lease.expired:
            return False
        came = f"after {update.num_received} tensors, {update.num_missing} were missing"
        self.drop(f"the lease of {update.lease.seconds:g} s ran out {came}")
        return True

    # --- the open update, step side ----------------------------------------------------------------------------

    def commit(self) -> CommitResult:
        """Write the verified update into the serving weights, all or nothing.

        Raises `TransactionStateError` unless verified (nothing changes), `CommitError` (the update is dropped; its
        `restored` states whether the old weights are back); both on all ranks, as one that has nothing to commit votes
        all the same.  Anything else that it raises leaves the commit in doubt: serving must end.
        """
        try:
            update = self._require_update("commit")
            update.check_committable()
        except TransactionStateError:
            self._commit_vote(False)
            raise
        try:
            result = update.commit(self._commit_vote)
        except CommitError as error:
            self.drop(str(error), reported=True, by_sender=True)  # all of it had come: no bucket is on its way
            raise
        self._held.release_in_background(update.close)
        self.book.note(update.id, Outcome("committed"))
        self.update, self.book.last_failure = None, None
        return result

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def receiver(self) -> Receiver:
        """The receiver that the source of the next call is made with."""
        memory = self._held.receive if self.is_open else None
        # Whole: what is wrong with a bucket is found before any of it is written.
        whole, calls = self.holds_steps, self.model.known_calls
        return Receiver(self._device, self._timeout_s, self.groups, self.patience, memory, whole, calls)

    @property
    def is_open(self) -> bool:
        return self.update is not None

    @property
    def weights(self) -> LogicalWeights:
        return self.model.weights

    @property
    def torn(self) -> str | None:
        """Why the model is neither the old version nor a new one, until a complete refresh is committed."""
        return self.model.torn

    @property
    def target(self) -> LogicalWeights:
        """The weights that the open update is staged for; `weights` unless it adopts a placement."""
        return self.weights if self.update is None else self.update.transaction.weights

    @property
    def holds_steps(self) -> bool:
        """True if receiving writes into the model, so that no step may run from the first bucket to the end."""
        is_apart = self.update is not None and self.update.is_apart
        return not is_apart and self._staging in HOLDING_MODES

    @property
    def is_dirty(self) -> bool:
        """True if the model may hold anything of the open update, on any rank: nothing may be sampled.

        Between two verbs it is the same on all ranks, by `has_begun_to_receive`.
        """
        update = self.update
        return update is not None and (update.transaction.dirty or (self.holds_steps and update.may_have_written))

    def status(self) -> dict[str, Any]:
        """Return the open update, its lease, the mode, and the last that failed; None for what there is not."""
        update, failure = self.update, self.book.last_failure
        none: dict[str, Any] = dict.fromkeys((*STATUS_FIELDS, "update_id", "target", "lease_s", "lease_left_s"))
        return (none | {"implicit": False, "bound": False} if update is None else update.status()) | {
            "open": update is not None,
            "staging": self._staging,
            "last_failure": None if failure is None else asdict(failure),
        }

    def outcome(self, update_id: str) -> Outcome:
        """Return the outcome of an update, which may still be open; callable on any thread."""
        update = self.update
        return self.book.outcome(update_id) if update is None or update_id != update.id else update.outcome

    def staged(self, name: str) -> Sequence[Part] | None:
        """Return this rank's staged parts of a tensor by canonical name; None if none is open or it has not come."""
        return None if self.update is None else self.update.transaction.read_staged(name)

    def renew_lease(self, seen_at: float | None = None) -> None:
        """Restart the lease of the open update: its sender is alive.  `seen_at`: see `Lease.renew`."""
        if self.update is not None:
            self.update.lease.renew(seen_at)

    @property
    def lease_deadline(self) -> float:
        """The time at which the open update's lease runs out, by its clock; `math.inf` where none does."""
        return math.inf if self.update is None else self.update.lease.deadline

    # --- whose calls ---------------------------------------------------------------------------------------------

    def foreign(self, update_id: str | None, weight_version: str | None = None) -> TransactionStateError | None:
        """Return why a call does not belong to the open update; None if it does.

        A call that names no update is not foreign while none is open.
        """
        update = self.update
        if update_id is None:
            return None if update is None else update.foreign(weight_version)
        if update is not None and update_id == update.id:
            return None
        ended = self.outcome(update_id)
        because = "" if ended.reason is None else f": {ended.reason}"
        other = "" if update is None else f"; another one is open {update.way_out}"
        return TransactionStateError(f"the weight update {update_id!r} is {ended.kind}, not open{because}{other}")

    def relation(self, update_id: str | None, weight_version: str | None, pause: int) -> Relation:
        """Return the relation of a call that brings tensors to the open update, after `pause` pauses."""
        update = self.update
        if update_id is None and (update is None or update.is_left(pause)):
            if self.book.loss is not None:
                return Relation.LOST
            return Relation.FIRST if update is None else Relation.NEW_PAUSE
        if self.foreign(update_id, weight_version) is not None:
            return Relation.FOREIGN
        if update is None or not update.is_implicit:
            return Relation.BEGUN
        return Relation.JOINED if update_id is None else Relation.SAME

    def require_own(self, update_id: str | None) -> None:
        """Raise the error that `foreign` returns, if it returns one."""
        if (foreign := self.foreign(update_id)) is not None:
            raise foreign

    def require_none_open(self, what: str = "") -> None:
        """Raise `TransactionStateError` if an update is open; the message states that `what` is refused."""
        if self.update is not None:
            refused = what and f"{what}: "
            raise TransactionStateError(f"{refused}a weight update is already open {self.update.way_out}")

    def admit(self, update_id: str | None, verb: str) -> WeightUpdate:
        """Return the open update, for a call that belongs to it.  Raises `TransactionStateError`."""
        self.require_own(update_id)
        update = self._require_update(verb)
        update.admit(update_id)
        return update

    # --- helpers -----------------------------------------------------------------------------------------------

    def _require_update(self, verb: str) -> WeightUpdate:
        if self.update is None:
            raise self.book.nothing_open(verb)
        return self.update

    def _close(self, reason: str, *, reported: bool, by_sender: bool) -> WeightUpdate:
        update = self._require_update("abort")
        ended = update.ended("aborted" if reported else "lost", reason, steps_held=self.holds_steps)
        self.book.note_drop(ended, reason)
        self.update = None
        self._held.end()
        if not by_sender:
            self.book.record_loss(reason, reported=reported)
        return update

    def _note_failure(self, update: WeightUpdate, reason: str | None) -> None:
        if message := update.failure_text(reason):
            self.book.note_failure(message, update.transaction.weight_version)

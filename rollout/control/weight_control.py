"""The work of each weight verb: it opens an update, fills it, or settles and publishes it.

    begin -> bucket* -> end: verify on the I/O thread, commit and publish at a step boundary

`weight_sync/update.py` has the states of an update, `update_rule.py` what calls without begin and end do.
`weight_queue` has the order of verbs.  `weight_commit` commits.  `lease_monitor` acts without a verb (leases, pauses).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec

from rollout.control.draft_target import Companions
from rollout.control.kv_age import abort_below, require_known_version
from rollout.control.lease_monitor import LeaseMonitor
from rollout.control.placement_adoption import PlacementAdoption
from rollout.control.rank_consensus import RankConsensus
from rollout.control.registered_adapters import require_checksums
from rollout.control.weight_begin import WeightBegin
from rollout.control.weight_commit import WeightCommit, committed, successor
from rollout.control.weight_groups import WeightGroups
from rollout.control.weight_queue import Job, WeightQueue, nothing, replies
from rollout.control.weight_reading import reading_jobs
from rollout.control.weight_sources import SOURCES
from rollout.core.errors import BadRequest, Conflict
from rollout.core.messages.io_struct import ContinueGenerationReqInput, ContinueReply
from rollout.core.messages.message import ControlReqInput, ControlReqOutput, NoReply
from rollout.core.messages.update_state import CommitReply, EndedUpdateState, UpdateStateReply
from rollout.core.messages.weight_replies import VersionReply
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    BringsTensorsReqInput,
    BucketReply,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    UpdateWeightsReqInput,
    UpdateWeightVersionReqInput,
)
from rollout.scheduler.agenda import Work
from rollout.scheduler.scheduler import Scheduler, VerbHandler
from rollout.scheduler.serving_state import ServingState
from weight_sync.errors import LostVoteError, TransactionStateError
from weight_sync.ledger import Coverage
from weight_sync.update import WeightUpdate
from weight_sync.update_rule import RULE, Deed, Engine, Relation
from weight_sync.updater import WeightUpdater

CONTINUE_WAITS_S = 10.0
"""A continue waits this long for a bucket that is being sent.  The bucket of a live trainer needs far less."""


_ABOUT_TO_OPEN = "(it begins): wait for its answer, or end it with abort_weight_update"


class _Continue(ContinueGenerationReqInput, kw_only=True):
    """A continue as it arrived: `pauses` came before it."""

    pauses: int


class WeightControl:
    """`pause_timeout_s`: see `LeaseMonitor`."""

    def __init__(
        self,
        scheduler: Scheduler,
        updater: WeightUpdater,
        wake: Callable[[], None],
        consensus: RankConsensus,
        adoption: PlacementAdoption,
        commit: WeightCommit,
        companions: Companions,
        pause_timeout_s: float | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._consensus = consensus
        self._adoption = adoption
        self._commit = commit
        self._companions = companions
        self._leases = LeaseMonitor(scheduler, updater, pause_timeout_s, companions.draft)
        self._queue = WeightQueue(
            scheduler,
            wake,
            consensus,
            starting=self._before_verb,
            finished=self._after_verb,
            settle=self._leases.check,
            wait_limit=self._wait_limit,
        )
        self._begin = WeightBegin(scheduler, updater, adoption, companions)
        self._registered = companions.registered
        self._status = updater.status()  # when the verb that is under way began
        self._is_given_up = False  # the pause, while a verb was under way
        self._queue.add(
            {
                **WeightGroups(updater, scheduler.parallel.position).jobs,
                BeginWeightUpdateReqInput: self._begin.job,
                EndWeightUpdateReqInput: self._end,
                AbortWeightUpdateReqInput: self._abort,
                UpdateWeightVersionReqInput: self._relabel,
                **reading_jobs(scheduler, updater),
                _Continue: self._continue,
                **dict.fromkeys(SOURCES, self._receive),
            }
        )

    @property
    def verbs(self) -> dict[type, VerbHandler]:
        """The verbs that are handled at once."""
        return {ContinueGenerationReqInput: self._on_continue, GetWeightUpdateReqInput: self._get_update}

    @property
    def queued_verbs(self) -> dict[type, VerbHandler]:
        """The verbs that take their turn."""
        return self._queue.verbs

    @property
    def advance(self) -> Work:
        """The work between steps: finish the verb whose I/O is done, start the next, see to the leases."""
        return self._queue.advance

    def add_jobs(self, planners: dict[type, Callable[[Any], Job]]) -> None:
        """Add further verbs that take their turn in the queue, by message type."""
        self._queue.add(planners)

    @property
    def under_way(self) -> str | None:
        """The reason why weights and the places of experts must not change now, as far as this rank knows."""
        if self._queue.busy:
            return "a weight verb is being carried out"
        update = self._updater.update
        return None if update is None else f"a weight update is open {update.way_out}"

    @property
    def has_verbs(self) -> bool:
        """True while a weight verb has yet to be answered; the same on all ranks of the engine."""
        return not self._queue.is_empty

    def on_pause(self) -> None:
        """Note that a pause was asked for."""
        self._leases.on_pause_call(now=not self._queue.busy)
        self._queue.call()

    def on_paused(self) -> None:
        """Note that generation is paused."""
        self._leases.on_pause()
        self._queue.call()

    def require_no_update_in_pause(self) -> None:
        """Raise `Conflict` while an update is received in a pause: it must be settled before generation goes on."""
        update = self._updater.update
        if self._scheduler.serving.is_paused and (self._queue.busy or (update is not None and update.is_implicit)):
            way_out = _ABOUT_TO_OPEN if update is None else update.way_out
            raise Conflict(f"a weight update is being received in this pause {way_out}")

    def on_pause_given_up(self) -> None:
        """Note that generation goes on without a continue.  The update of that pause is dropped once no verb runs."""
        self._is_given_up = True
        if not self._queue.busy:
            self._drop_given_up()
            self._queue.call()

    def _drop_given_up(self) -> None:
        if self._is_given_up and self._has_implicit_update:
            self._updater.drop("a pause was given up while it was open")
        self._is_given_up = False

    @property
    def _has_implicit_update(self) -> bool:
        update = self._updater.update
        return update is not None and update.is_implicit

    def _on_continue(self, verb: ContinueGenerationReqInput) -> None:
        """Queue a continue.  It does not end pauses that come while it waits for its turn."""
        self._queue.put(_Continue(**msgspec.structs.asdict(verb), pauses=self._leases.num_pauses))

    def _get_update(self, verb: GetWeightUpdateReqInput) -> ControlReqOutput[UpdateStateReply]:
        if verb.update_id is None:
            return verb.answer(self.status())
        found = self._updater.outcome(verb.update_id)
        told = {"update_id": verb.update_id, "outcome": found.kind, "reason": found.reason}
        return verb.answer(msgspec.convert(dict(found.answer) | told, UpdateStateReply))

    def _wait_limit(self, verb: ControlReqInput[Any], job: Job) -> float | None:
        """Return the seconds for which the job may wait for its sender while a later verb waits; None: no limit."""
        if isinstance(verb, DestroyWeightsUpdateGroupReqInput):  # its sender has left the group
            return 0.0 if getattr(job.verb, "group_name", None) == verb.group_name else None
        if isinstance(verb, AbortWeightUpdateReqInput) or (isinstance(verb, EndWeightUpdateReqInput) and verb.abort):
            return 0.0 if self._updater.foreign(verb.update_id) is None else None
        return CONTINUE_WAITS_S if isinstance(verb, ContinueGenerationReqInput) else None

    def status(self) -> UpdateStateReply:
        """Return the state of the open update; while a verb is under way, which may work on it, as of its beginning."""
        return UpdateStateReply(
            **(self._status if self._queue.busy else self._updater.status()),
            busy=self._queue.busy,
            steps_held=self._scheduler.serving.is_writing,
            pause_left_s=self._leases.pause_left_s,
            poisoned=self._scheduler.serving.poisoned,
        )

    def ended(self) -> list[EndedUpdateState]:
        """Return the last updates that ended, oldest first."""
        return [EndedUpdateState(**asdict(update)) for update in tuple(self._updater.book.ended)]

    def _before_verb(self, verb: ControlReqInput[Any]) -> None:
        self._leases.on_start(verb)
        self._registered.settle()
        self._status = self._updater.status()

    def _after_verb(self, verb: ControlReqInput[Any], succeeded: bool) -> None:
        self._drop_given_up()
        self._leases.on_verb(verb, succeeded)
        self._begin.note_digests()
        self._registered.settle()

    # --- verbs ----------------------------------------------------------------------------------------------------

    def _receive(self, verb: UpdateWeightsReqInput[Any]) -> Job:
        updater, pause = self._updater, self._leases.num_pauses
        relation = updater.relation(verb.update_id, verb.weight_version, pause)
        deed = RULE[_engine_state(self._scheduler.serving), relation]
        source = functools.partial(SOURCES[type(verb)], verb, updater)
        refusal = self._refusal(verb, relation, deed)
        if refusal is not None:
            turn_away = functools.partial(updater.turn_away, refusal=refusal)
            return Job(verb, lambda: turn_away(source()), replies("", BucketReply()), waits=updater.patience)
        if verb.abort_all_requests:
            self._scheduler.abort(None)
        if deed.opens is not None:
            self._adoption.opening()
        cast = verb.cast if isinstance(verb, BringsTensorsReqInput) else None
        is_alone, adds_up = deed.settles == "this call", deed.settles == "the call that completes it"
        own_id = verb.request_id if is_alone else verb.update_id
        drop = functools.partial(updater.drop, reported=True)

        def io() -> bool:
            if deed.opens is not None:
                try:
                    self._open(verb, deed.opens, pause, None if cast else cast)
                except Exception as error:
                    updater.turn_away(source(), error)
            try:
                updater.receive(source(), verb.weight_version, verb.update_id, cast)
            except Exception as error:
                if is_alone:
                    updater.abort(own_id)
                elif adds_up:
                    drop(str(error))
                raise
            is_whole = is_alone or (adds_up and updater.status()["missing"] == 0)
            if is_whole:
                updater.verify(own_id)
            return is_whole

        def step(is_whole: bool) -> tuple[str, BucketReply]:
            if is_whole:
                message, commit = self._commit.run(alone=is_alone)
                return message, BucketReply(**msgspec.structs.asdict(commit))
            return "Succeeded to receive weights.", BucketReply(weight_update=UpdateStateReply(**updater.status()))

        roll_back = drop if adds_up else updater.fail
        return Job(verb, io, step, holds_steps=updater.holds_steps, roll_back=roll_back, waits=updater.patience)

    def _open(self, verb: UpdateWeightsReqInput[Any], coverage: Coverage, pause: int, cast: bool | None) -> None:
        """Open an update for a client without begin, on all ranks or on none.  Raises what keeps this rank from it."""
        updater = self._updater
        try:
            if updater.is_open:
                updater.drop("a new pause and a new bucket came before the update was settled")
            covered, parts = self._companions.of_call(verb.selector, coverage)
            updater.open_implicit(covered, verb.request_id, cast=cast, pause=pause, **parts)
        except Exception:
            self._consensus.vote(False)
            raise
        # Before anything is received: a rank without an update receives into nothing, and the others do then, too.
        if not self._consensus.vote(True):
            reason = "another rank could not open the weight update"
            updater.drop(reason, reported=True, by_sender=True)
            raise LostVoteError(reason)

    def _refusal(self, verb: UpdateWeightsReqInput[Any], relation: Relation, deed: Deed) -> Exception | None:
        """Return why a call that brings tensors is turned away; None if it is not."""
        updater = self._updater
        if deed.refused:
            is_lost = relation is Relation.LOST
            refusal = updater.book.loss_error() if is_lost else updater.foreign(verb.update_id, verb.weight_version)
            assert refusal is not None, "`RULE` refuses no other calls"
            return refusal
        return self._companions.refusal(verb.selector, updater.update if deed.opens is None else None)

    def _end(self, verb: EndWeightUpdateReqInput) -> Job:
        update_id, checksums = verb.update_id, verb.expected_lora_checksums
        if verb.abort:
            return self._end_by_abort(verb)
        if verb.phase == "commit" and checksums is not None:
            raise BadRequest(
                "expected_lora_checksums are compared as the update is verified: send them with that phase"
            )
        if update_id is not None and (ended := self._updater.outcome(update_id)).kind == "committed":
            reply = msgspec.convert(ended.answer, CommitReply)
            return Job(verb, nothing, replies(committed(reply), reply))
        open_update = self._updater.update
        self._begin.require_no_adapters(None if open_update is None else open_update.id)
        verified = replies("Weight update verified; commit or abort it.", CommitReply())
        if open_update is not None and verb.phase == "verify" and _is_repeated(verb, open_update):
            return Job(verb, functools.partial(require_checksums, checksums, open_update), verified)

        def verify() -> None:
            update = self._updater.admit(update_id, "verify")
            if verb.weight_version is not None and not update.is_verified:  # one that is refused changes nothing
                update.transaction.weight_version = verb.weight_version
            self._updater.verify(update_id, functools.partial(require_checksums, checksums))

        if verb.phase == "verify":
            return Job(verb, verify, verified)
        if verb.phase == "commit":
            roll_back = functools.partial(self._updater.drop, reported=True, by_sender=True)
            admit = functools.partial(self._updater.admit, update_id, "commit")
            return Job(verb, admit, lambda _: self._commit.run(), roll_back=roll_back)
        return Job(verb, verify, lambda _: self._commit.run())

    def _end_by_abort(self, verb: EndWeightUpdateReqInput) -> Job:
        """Plan the abort of SGLang's clients, who make it also for registrations without an update."""

        def step(_: Any) -> tuple[str, CommitReply]:
            self._registered.drop_deferred()
            return self._leases.abort_message(), CommitReply()

        is_only_registered = not self._updater.is_open and verb.update_id is None and self._registered.has_deferred
        return Job(verb, nothing if is_only_registered else lambda: self._updater.abort(verb.update_id), step)

    def _abort(self, verb: AbortWeightUpdateReqInput) -> Job:
        step = lambda _: (self._leases.abort_message(), NoReply())  # noqa: E731
        return Job(verb, lambda: self._updater.abort(verb.update_id), step)

    def _continue(self, verb: _Continue) -> Job:
        settles = self._has_implicit_update

        def io() -> None:
            if not settles and (loss := self._updater.book.report_loss()) is not None:
                raise TransactionStateError(f"the weight update was lost: {loss}; another continue just continues")
            state = self._scheduler.runner.state
            update = self._updater.update
            is_models = update is not None and update.target is self._updater.model
            named = update.transaction.weight_version if update is not None and is_models else None
            coming = named or successor(state.epoch.weight_version)
            is_coming = settles and is_models
            require_known_version(state, verb.abort_below_weight_version, coming if is_coming else None)
            if settles:
                self._updater.verify()

        def step(_: Any) -> tuple[str, ContinueReply]:
            serving = self._scheduler.serving
            facts = msgspec.structs.asdict(self._commit.run()[1]) if settles else {}
            aborted = abort_below(self._scheduler, verb.abort_below_weight_version)
            if verb.pauses != self._leases.num_pauses:
                message = "Generation stays paused: another pause came after this call."
                return message, ContinueReply(
                    **facts, paused=serving.is_paused or serving.is_pausing, num_aborted=aborted
                )
            serving.resume()
            return "Generation continued successfully.", ContinueReply(**facts, paused=False, num_aborted=aborted)

        return Job(verb, io, step)

    def _relabel(self, verb: UpdateWeightVersionReqInput) -> Job:
        def step(_: Any) -> tuple[str, VersionReply]:
            if verb.abort_all_requests:
                self._scheduler.abort(None)
            update = self._updater.update
            if update is not None and update.target is self._updater.model:
                update.transaction.weight_version = verb.new_version
            else:
                state = self._scheduler.runner.state
                with state.mutate("version update"):
                    state.relabel(verb.new_version)
            return f"Weight version updated to {verb.new_version}.", VersionReply(new_version=verb.new_version)

        return Job(verb, lambda: self._updater.require_own(verb.update_id), step)


def _is_repeated(verb: EndWeightUpdateReqInput, update: WeightUpdate) -> bool:
    """Return whether a call to verify comes again, as its answer did not arrive: by its id and its version."""
    is_same = verb.update_id is not None and verb.update_id == update.id
    return is_same and update.is_verified and verb.weight_version in (None, update.transaction.weight_version)


def _engine_state(serving: ServingState) -> Engine:
    if serving.is_paused or serving.is_pausing:
        return Engine.PAUSED
    return Engine.EMPTY if serving.content_lost else Engine.RUNNING

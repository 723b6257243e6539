"""Control verbs that need no weights: pause, flush, state, shutdown."""

from __future__ import annotations

from typing import Any

from rollout.control.draft_target import DraftTarget
from rollout.control.eplb_control import EplbControl, NoExpertsToMove
from rollout.control.expert_distribution import ExpertDistribution
from rollout.control.memory_control import MemoryControl
from rollout.control.weight_control import WeightControl
from rollout.core.errors import BadRequest, Conflict
from rollout.core.messages.io_struct import (
    FlushCacheReqInput,
    GetStateReqInput,
    GiveUpPauseReply,
    GiveUpPauseReqInput,
    PauseGenerationReqInput,
    PauseReply,
    ShutdownReqInput,
)
from rollout.core.messages.message import ControlReqOutput, NoReply, failure
from rollout.core.messages.scheduler_state import PublishedWeights, SchedulerState
from rollout.scheduler.scheduler import Scheduler, VerbHandler


class Control:
    """Handlers of pause, flush, state and shutdown, and the drain at the end of the server's life."""

    def __init__(
        self,
        scheduler: Scheduler,
        weights: WeightControl,
        memory: MemoryControl,
        experts: ExpertDistribution,
        eplb: EplbControl | NoExpertsToMove,
        draft: DraftTarget | None,
        static_state: dict[str, Any],
    ) -> None:
        self._scheduler = scheduler
        self._weights = weights
        self._memory = memory
        self._experts = experts
        self._eplb = eplb
        self._draft = draft
        self._static_state = static_state
        self._awaited: list[tuple[float, PauseGenerationReqInput]] = []  # deadlines of the pauses that wait
        self._waited: set[str] = set()  # names of the waiting pauses that made the one in force, if no other did
        self._shutdown: ShutdownReqInput | None = None
        self._drain_until = 0.0

    @property
    def verbs(self) -> dict[type, VerbHandler]:
        return {
            PauseGenerationReqInput: self._pause,
            GiveUpPauseReqInput: self._give_up,
            FlushCacheReqInput: self._flush_cache,
            GetStateReqInput: self._get_state,
            ShutdownReqInput: self._begin_shutdown,
        }

    def _pause(self, verb: PauseGenerationReqInput) -> ControlReqOutput[PauseReply] | None:
        """Pause until continue; the answer means that no step runs any more."""
        scheduler = self._scheduler
        if verb.mode == "wait":
            self._weights.require_no_update_in_pause()
        self._weights.on_pause()
        self._waited.clear()
        if verb.mode == "wait":
            scheduler.serving.pause_once_ended()
            self._awaited.append((scheduler.now + verb.wait_s, verb))
            scheduler.agenda.call(self.settle_waits)
            return None
        aborted = 0
        if verb.mode == "abort":
            aborted = scheduler.abort(None)
        elif verb.mode == "retract":
            scheduler.retract(scheduler.queues.holding_kv())
        return self._paused(verb, aborted)

    def settle_waits(self) -> None:
        """Pause once all requests that had begun have ended, and answer the pauses that wait for this.

        A waiting pause fails if its time is over, or if another call has paused or continued generation.
        """
        if not self._awaited:  # all were given up
            return
        scheduler, serving, waiting = self._scheduler, self._scheduler.serving, self._awaited
        num_begun = scheduler.num_begun()
        is_over = num_begun == 0 and (serving.is_pausing or serving.is_paused)
        self._awaited = []
        for until, verb in waiting:
            if is_over:
                scheduler.reply(self._paused(verb))
            elif not serving.is_pausing:
                now = "paused in another mode" if serving.is_paused else "continued"
                scheduler.reply(failure(verb.request_id, Conflict(f"generation was {now} before requests had ended")))
            elif scheduler.now >= until:
                now = "stays paused, as it was" if serving.was_paused else "goes on"
                reason = f"{num_begun} requests have not ended within {verb.wait_s:g} s; generation {now}"
                scheduler.reply(failure(verb.request_id, Conflict(reason)))
            else:
                self._awaited.append((until, verb))
        if is_over:
            self._waited = {verb.wait_id for _, verb in waiting if verb.wait_id is not None}
        if self._awaited:
            scheduler.agenda.call(self.settle_waits)
        self._end_waiting()

    def _give_up(self, verb: GiveUpPauseReqInput) -> ControlReqOutput[GiveUpPauseReply]:
        """Give up a pause; the others that wait, or that made the same pause, keep theirs."""
        scheduler = self._scheduler
        given_up = [one for _, one in self._awaited if one.wait_id == verb.wait_id]
        self._awaited = [(until, one) for until, one in self._awaited if one.wait_id != verb.wait_id]
        for one in given_up:
            scheduler.reply(failure(one.request_id, Conflict("the pause was given up")))
        if verb.wait_id in self._waited:
            self._waited.remove(verb.wait_id)
            if not self._waited:
                self._restore()
        self._end_waiting()
        return verb.answer(GiveUpPauseReply(paused=scheduler.serving.is_paused))

    def _end_waiting(self) -> None:
        """Restore the state before a pause that no caller waits for any more."""
        if self._scheduler.serving.is_pausing and not self._awaited:
            self._restore()

    def _restore(self) -> None:
        """Restore the state before the last pause that waited, unless a continue has ended it."""
        serving = self._scheduler.serving
        if serving.is_paused or serving.is_pausing:
            serving.give_up_pause()
            if not serving.is_paused:
                self._weights.on_pause_given_up()

    def _paused(self, verb: PauseGenerationReqInput, aborted: int = 0) -> ControlReqOutput[PauseReply]:
        scheduler = self._scheduler
        scheduler.serving.pause()
        self._weights.on_paused()
        reply = PauseReply(
            paused=True,
            mode=verb.mode,
            num_running=len(scheduler.queues.holding_kv()),
            num_waiting=len(scheduler.queues.waiting),
            num_aborted=aborted,
        )
        return verb.answer(reply, "Generation paused successfully.")

    def _flush_cache(self, verb: FlushCacheReqInput) -> ControlReqOutput[NoReply]:
        scheduler = self._scheduler
        if verb.retract:
            scheduler.retract(scheduler.queues.holding_kv())
        running, waiting = scheduler.num_active(waiting=not (scheduler.serving.is_paused or verb.retract))
        if running or waiting:
            raise BadRequest(f"Flush cache failed: {running} requests running, {waiting} waiting.")
        scheduler.cache.flush()
        return verb.answer(NoReply(), "Cache flushed.")

    def _get_state(self, verb: GetStateReqInput) -> ControlReqOutput[SchedulerState]:
        scheduler = self._scheduler
        scheduler.parallel.tp.all_agree(True)  # an answer proves that all ranks are there
        queues, cache, stats = scheduler.queues, scheduler.cache, scheduler.stats
        serving, state = scheduler.serving, scheduler.runner.state
        total = cache.allocator.num_slots
        used = total - cache.num_available
        found = SchedulerState(
            num_running_reqs=len(queues.holding_kv()),
            num_waiting_reqs=len(queues.waiting),
            num_used_tokens=used,
            num_cached_tokens=cache.prefix_cache.num_cached,
            num_pinned_tokens=cache.prefix_cache.num_pinned,
            num_running_sessions=len({req.source.session_id for req in queues.holding_kv()} - {None}),
            num_total_tokens=queues.waiting.num_tokens + sum(req.num_tokens for req in queues.holding_kv()),
            max_total_num_tokens=total,
            token_usage=used / total,
            num_used_state_rows=0 if cache.states is None else cache.states.num_used,
            num_state_rows=0 if cache.states is None else cache.states.num_rows,
            gen_throughput=stats.gen_throughput,
            cache_hit_rate=stats.cache_hit_rate,
            num_retracted_reqs=stats.num_retractions,
            num_generated_tokens=stats.num_generated,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_prompt_tokens_reused=stats.num_cached_tokens,
            num_drafts=stats.drafts.num_steps,
            num_draft_tokens=stats.drafts.num_drafted,
            num_accepted_draft_tokens=stats.drafts.num_kept,
            num_accepted_draft_tokens_per_pos=stats.drafts.kept_per_place(),
            spec_accept_length=stats.drafts.accept_length(stats.num_generated),
            prefix_granularity=cache.granularity,
            num_kv_event_batches=None if scheduler.kv_events is None else scheduler.kv_events.num_batches,
            step_time_ms=stats.step_time_ms(),
            paused=serving.is_paused or serving.is_pausing,
            withheld=serving.withheld,
            memory=self._memory.status(),
            poisoned=serving.poisoned,
            weights_path=state.model_path,
            weight_version=state.epoch.weight_version,
            weight_epoch=state.epoch.weight_epoch,
            placement_epoch=state.epoch.placement_epoch,
            content_digest=state.epoch.content_digest,
            held_digest=state.epoch.held_digest,
            weight_versions=[
                PublishedWeights(
                    weight_version=epoch.weight_version,
                    weight_epoch=epoch.weight_epoch,
                    content_digest=epoch.content_digest,
                    held_digest=epoch.held_digest,
                )
                for epoch in state.recent_epochs
            ],
            draft=None if self._draft is None else self._draft.version(),
            weight_update=self._weights.status(),
            ended_updates=self._weights.ended(),
            expert_distribution=self._experts.status(),
            eplb=self._eplb.status(),
            **self._static_state,
        )
        return verb.answer(found)

    def _begin_shutdown(self, verb: ShutdownReqInput) -> None:
        """Begin to drain; `drain` answers once everything has ended."""
        self._shutdown = verb
        self._drain_until = self._scheduler.now + verb.drain_s
        self._scheduler.serving.drain()
        self._scheduler.agenda.call(self.drain)

    def drain(self) -> None:
        """End the remaining requests of a server that shuts down, and answer once everything has ended."""
        scheduler, shutdown = self._scheduler, self._shutdown
        assert shutdown is not None, "it is called from a shutdown on"
        is_late = scheduler.now >= self._drain_until
        if scheduler.queues.all() and (scheduler.serving.stands_still or is_late):
            scheduler.abort(None)
        if scheduler.num_active(waiting=True) == (0, 0) and (is_late or not self._weights.has_verbs):
            scheduler.serving.stop()
            scheduler.reply(shutdown.answer(NoReply(), "stopped"))
        else:
            scheduler.agenda.call(self.drain)

"""`Scheduler`: the loop that turns an inbox into steps and records.

    inbox -> accept / abort / control verbs -> plan -> launch -> finish -> outbox
                                                        n        n, or with `overlaps` n - 1

`policy` chooses the requests of the next step, and `step` has the two halves of a step.  `rollout.memory` has the
slots, `records` the messages that leave, and `rollout.control` the control verbs.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollout.core.console import say
from rollout.core.errors import BadRequest, FatalError, LockstepError, Unavailable, status_of
from rollout.core.forward_batch import StepKind
from rollout.core.messages.io_struct import AbortReqInput, BatchTokenOutput, SchedulerInput, TokenizedGenerateReqInput
from rollout.core.messages.message import ControlReqInput, ControlReqOutput, failure
from rollout.core.messages.req_output import FinishReason, ReqOutput
from rollout.core.messages.unreadable import Unreadable
from rollout.distributed.parallel import Parallel
from rollout.executor.model_runner import ModelRunner
from rollout.memory.cache_manager import CacheManager
from rollout.memory.kv_events import KVEvents
from rollout.scheduler.agenda import Agenda, Work
from rollout.scheduler.channel import Channel
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.in_flight import InFlight, RankCounts
from rollout.scheduler.policy import Policy, RequestQueues, StepPlan
from rollout.scheduler.records import RecordReader
from rollout.scheduler.req import Req
from rollout.scheduler.seeds import SeedSource
from rollout.scheduler.serving_state import ServingState
from rollout.scheduler.stats import StepStats
from rollout.scheduler.step import StepRunner
from rollout.scheduler.stop import StopChecker

_IDLE_WAIT_MS = 200
_SOON_MS = 1
VerbHandler = Callable[..., ControlReqOutput[Any] | None]
"""Function that carries out one control verb.  None: the answer comes later."""


class Scheduler:
    """Owns the queues and the gates.  It has one thread; `tick` is one turn of the loop, run in inference mode.

    On several ranks every rank runs a scheduler, in step with the others.  They share the inbox, so verbs and the work
    between steps run on all ranks in the same turn, and may communicate.
    """

    def __init__(
        self,
        *,
        channel: Channel,
        runner: ModelRunner,
        cache: CacheManager,
        queues: RequestQueues,
        policy: Policy,
        steps: StepRunner,
        records: RecordReader,
        stop: StopChecker,
        max_queued_requests: int,
        random_seed: int | None,
        overlaps: bool,
        parallel: Parallel,
        rest: Callable[[], None],
        kv_events: KVEvents | None = None,
    ) -> None:
        self.parallel = parallel
        self.runner = runner
        self.cache = cache
        self.queues = queues
        self.records = records
        self.kv_events = kv_events
        self.stats = StepStats(steps.draft_counts)
        self.serving = ServingState(self.finish_step)
        self.agenda = Agenda(channel)
        self._channel = channel
        self._policy, self._steps = policy, steps
        self._stop = stop
        self._max_queued = max_queued_requests
        self._overlaps = overlaps and not steps.drafts  # a draft follows all tokens, and observers what is kept
        self.rest_helpers = rest  # called if no step follows
        self._is_alone = parallel.attn_dp.size == 1  # no other data-parallel rank takes part in a step
        self._engine_busy = False  # whether any data-parallel rank had tokens in the last step
        self._nothing = StepPlan(DecodeBatch())
        self._seeds = SeedSource(random_seed, parallel)
        self._in_flight: InFlight | None = None
        self._soon, self._arrivals = False, 0
        self._by_rid: dict[str, Req] = {}
        self._verbs: dict[type, VerbHandler] = {}
        self._queued: set[type] = set()

    # --- wiring ---------------------------------------------------------------------------------------------------

    def connect(
        self,
        verbs: Mapping[type, VerbHandler],
        queued_verbs: Mapping[type, VerbHandler],
        between_steps: Sequence[Work],
    ) -> None:
        """Set the handlers by message type, and the order of the work between steps, which `agenda` runs.

        A handler answers at once, or returns None and calls `reply` later.  Queued verbs run later, and their deadline
        is checked only then.
        """
        self._verbs = {**verbs, **queued_verbs}
        self._queued = set(queued_verbs)
        self.agenda.order = between_steps

    def poll_quickly(self, soon: bool) -> None:
        """Let idle turns wait only briefly while `soon`, as something is about to be ready on all ranks."""
        self._soon = soon

    # --- the loop -------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds on a monotonic clock that all ranks of the engine share, as of this turn."""
        return self._channel.now

    @property
    def has_work(self) -> bool:
        queues = self.queues
        waits = self.serving.may_step and bool(queues.running or queues.partial or queues.waiting)
        return self._in_flight is not None or waits

    def num_active(self, *, waiting: bool) -> tuple[int, int]:
        """Return how many requests hold KV and, if asked, how many wait, on all data-parallel ranks of this engine.

        Called on all of them in the same turn.
        """
        self.finish_step()
        mine = len(self.queues.holding_kv()), len(self.queues.waiting) if waiting else 0
        counts = self.parallel.attn_dp.gather_ints(mine)
        return sum(running for running, _ in counts), sum(queued for _, queued in counts)

    def num_begun(self) -> int:
        """Return the number of requests that hold KV or did once, on all data-parallel ranks of this engine.

        Called on all of them in the same turn.
        """
        self.finish_step()
        queues = self.queues
        begun = len(queues.holding_kv()) + queues.waiting.num_begun
        return sum(count for (count,) in self.parallel.attn_dp.gather_ints((begun,)))

    def tick(self, wait_ms: int = _IDLE_WAIT_MS) -> bool:
        """Take messages, then run one step if there is work.  Returns True if a step ran."""
        if self.has_work or self._engine_busy:
            wait_ms = 0
        elif self._soon:
            wait_ms = min(wait_ms, _SOON_MS)
        for message in self._channel.receive(wait_ms):
            self._dispatch(message)
        self.agenda.run()
        self.parallel.require_whole()
        runs = not self.serving.is_stopped and (self.has_work or not self._is_alone)
        if runs:
            runs = self._turn()
        else:
            self._steps.rest()
            self.stats.idle()
        if self.kv_events is not None:
            self.kv_events.publish()
        return runs

    def _turn(self) -> bool:
        """Launch a step and finish the same one, or with `overlaps` the one before; True if there was either."""
        had_step = self._in_flight is not None
        step = self._launch()
        if self._overlaps:
            self.finish_step()
        self._in_flight = step
        if not self._overlaps:
            self.finish_step()
        return had_step or step is not None

    def finish_step(self) -> bool:
        """Finish the step in flight, if there is one.  Afterwards the host knows all sampled tokens.

        Every action on requests from outside a step calls this first: an abort, a retraction, a count of requests, a
        gate that closes.  A commit need not, as every step names the epoch that computes it.
        """
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._finish(step)
        return step is not None

    def _launch(self) -> InFlight | None:
        """Run the first half of a step: afterwards the queues are ready for the next one."""
        stats = self.stats
        stats.start_step()
        if self.queues.running.needs_history:
            self.finish_step()
        plan = self._nothing
        if self.has_work:
            epoch = self.runner.state.epoch.weight_epoch
            plan = self._policy.plan(epoch, self._retract, self.finish_step, begins=self.serving.may_begin)
        if self._steps.drafts:
            self._steps.add_drafts(plan, self.now)
        counts = None if self._is_alone else self._rank_counts(plan)
        stats.phase("plan")
        if plan.is_empty and (counts is None or not any(counts.tokens)):
            return None
        step = self._steps.launch(plan, counts, stats.phase)
        for req in step.completed:
            self.cache.share_prompt(req, step.epoch.weight_epoch)
        if step.completed or step.ending:
            self.queues.enter_launch(step.completed, step.ending)
        return step

    def _rank_counts(self, plan: StepPlan) -> RankCounts:
        """Return the tokens of each data-parallel rank.  All take part in a step, as experts are on all of them."""
        told = self.parallel.attn_dp.gather_ints([plan.num_tokens, self._steps.kind_of(plan)])
        tokens = [count for count, _ in told]
        self._engine_busy = any(tokens)
        return RankCounts(tokens, StepKind(min(kind for _, kind in told)))

    def _finish(self, step: InFlight) -> None:
        """Run the second half: records, finished requests, messages."""
        stats = self.stats
        outgoing, num_sampled = self._steps.finish(step, stats.phase)
        if step.is_idle:
            self._steps.rest()
            stats.idle()
            return
        for req in step.completed:
            if req.times.first_token is None:
                req.times.first_token = time.monotonic()
            if req.num_retractions == 0:
                stats.num_prompt_tokens += req.prompt_len
                stats.num_cached_tokens += req.cached_tokens
        if any(req.finished for req in outgoing):
            self.queues.drop_finished()
        stats.phase("process")
        if outgoing:
            if not self.has_work:
                self.rest_helpers()  # first, so that the thread that sends the answer finds an idle core
            self._emit(outgoing)
        stats.phase("messages")
        stats.end_step(num_sampled)

    def _emit(self, reqs: Iterable[Req]) -> None:
        """Send the new output of `reqs`; finished requests free their slots and are dropped."""
        outputs = []
        for req in reqs:
            outputs.append(self.records.output(req))
            if req.finished:
                self.cache.detach(req, self.runner.state.epoch.weight_epoch, req.session_to_pin)
                del self._by_rid[req.rid]
                self._steps.forget(req)
        if outputs:
            self._channel.send(BatchTokenOutput(outputs=outputs))

    # --- requests -------------------------------------------------------------------------------------------------

    def _dispatch(self, message: SchedulerInput | Unreadable) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            if self._is_alone or message.dp_rank == self.parallel.position.attn_dp_rank:
                sibling: Req | None = None
                for sample in message.samples():
                    sibling = self._accept(sample, sibling)
        elif isinstance(message, AbortReqInput):
            self._abort(message)
        elif isinstance(message, Unreadable):
            self._refuse_unreadable(message)
        else:
            self._control(message)

    def _refuse_unreadable(self, message: Unreadable) -> None:
        """Refuse the requests that an undecodable message names.  Such a message never ends the loop."""
        say(f"a message of the main process cannot be read: {message.error}", "ERROR")
        error = BadRequest(f"the scheduler cannot read the request: {message.error}")
        if self._is_alone or message.dp_rank == self.parallel.position.attn_dp_rank:
            for rid in message.rids:
                self._refuse(rid, error)
        if message.request_id is not None:
            self.reply(failure(message.request_id, error))

    def _accept(self, source: TokenizedGenerateReqInput, sibling: Req | None = None) -> Req | None:
        """Enqueue a sample, which shares its lists with `sibling`.  Returns it, or `sibling` if it is refused."""
        try:
            self._check(source)
            name = source.lora_name
            req = Req(
                source,
                arrival=self._arrivals,
                seed=self._seeds.seed_for(source),
                end_ids=self._stop.end_ids(source) if sibling is None else sibling.end_ids,
                stop_text=self._stop.text_for(source),
                adapter=None if name is None else self.runner.state.adapters.find(name),
                restriction=self._stop.restriction_for(source, self.runner.state.model.config.vocab_size),
                sibling=sibling,
            )
        except LockstepError as error:
            self._refuse(source.rid, error)
            return sibling
        self._arrivals += 1
        self._by_rid[req.rid] = req
        self.queues.enqueue(req)
        return req

    def _check(self, source: TokenizedGenerateReqInput) -> None:
        """Check that the scheduler's state allows the request, which itself was checked before it was sent."""
        self.serving.require_admission()
        if source.rid in self._by_rid:
            raise BadRequest(f"rid {source.rid!r} is already in flight")
        if len(self.queues.waiting) >= self._max_queued:
            raise Unavailable(f"{self._max_queued} requests wait already (--max-queued-requests)")
        longest, room = len(source.input_ids) + source.sampling_params.max_new_tokens, self.cache.allocator.num_slots
        if longest > room:
            raise BadRequest(
                f"prompt and max_new_tokens need {longest} tokens of KV, the pool has {room} (--max-total-tokens)"
            )

    def _refuse(self, rid: str, error: LockstepError) -> None:
        version = self.runner.state.epoch.weight_version
        output = ReqOutput.never_ran(rid, version, str(error), status_of(error))
        self._channel.send(BatchTokenOutput(outputs=[output]))

    def _abort(self, message: AbortReqInput) -> None:
        try:  # without an answer; a failure is logged, and does not end the loop
            self.abort(None if message.abort_all else message.rids)
        except FatalError:
            raise
        except Exception:
            say(f"an abort failed: {traceback.format_exc()}", "ERROR")

    def abort(self, rids: list[str] | None, error: LockstepError | None = None, reason: str | None = None) -> int:
        """End the given requests, or all (None), with their output so far.  Returns how many.

        Unknown rids are ignored, repeated ones count once.  Requests end with the message and status of `error`, or,
        without one, with `reason` as their message.
        """
        self.finish_step()
        names = list(self._by_rid) if rids is None else dict.fromkeys(rids)
        targets = [self._by_rid[rid] for rid in names if rid in self._by_rid]
        if not targets:
            return 0
        queues = self.queues
        for req in targets:
            waited = queues.waiting.discard(req)
            message = "Abort in waiting queue" if waited and not req.output_ids else "Aborted"
            req.finished = FinishReason(
                type="abort",
                message=str(error) if error else reason or message,
                status_code=status_of(error) if error else None,
            )
        queues.running.drop_finished()
        if queues.partial is not None and queues.partial.finished:
            queues.partial = None
        self._emit(targets)
        return len(targets)

    def poison(self, reason: str) -> None:
        """Stop serving: the weights in memory are neither the old nor the new ones.  Aborts all requests."""
        self.serving.poison(reason)
        self.runner.state.drop_digests()
        self.abort(None, Unavailable(f"the weights are poisoned: {reason}"))

    def retract(self, reqs: Iterable[Req]) -> None:
        """Send requests that hold KV back to the waiting queue, oldest first."""
        self.finish_step()
        queues = self.queues
        leaving = sorted((req for req in reqs if not req.finished), key=lambda req: -req.arrival)
        queues.running.remove(*leaving)
        for req in leaving:
            if req is queues.partial:
                queues.partial = None
            self._retract(req)
            queues.waiting.appendleft(req)

    def _retract(self, req: Req) -> None:
        self.records.save_rows(req)
        self.cache.detach(req, self.runner.state.epoch.weight_epoch)
        req.num_retractions += 1
        self.stats.num_retractions += 1

    # --- control verbs --------------------------------------------------------------------------------------------

    def _control(self, message: ControlReqInput[Any]) -> None:
        """Handle a verb, which may be refused.  Only an error after which ranks may differ ends the loop."""
        try:
            if type(message) not in self._queued:
                message.require_in_time(self.now)
            answer = self._verbs[type(message)](message)
        except FatalError:
            raise
        except Exception as error:
            answer = failure(message.request_id, error)
        if answer is not None:
            self.reply(answer)

    def reply(self, answer: ControlReqOutput[Any]) -> None:
        answer.dp_rank = self.parallel.position.dp_rank
        self._channel.send(answer)

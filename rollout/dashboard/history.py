"""`ServerHistory`: the last hour of a server, for a page that may be opened later.  It owns all that is kept.

It asks the scheduler for its state once a second, as /metrics does at each scrape, and keeps what is shown over time.
Everything is bounded.  Each entry gets the next number of one count, so that a reader asks for newer ones.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from rollout.core.errors import LockstepError
from rollout.core.messages.experts import EplbState, ExpertLoadState
from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.dashboard.answer_log import AnswerLog
from rollout.dashboard.latencies import LatencyWindow
from rollout.dashboard.machine import Machine
from rollout.dashboard.refusals import RefusalLog
from rollout.dashboard.route_probe import RouteProbe
from rollout.dashboard.samples import Sample, SampleTiers
from rollout.dashboard.trainer_log import TrainerLog, TrainerReport
from rollout.http.metrics.metrics import Metrics
from rollout.tokenizer_manager.manager import Phase, TokenizerManager

logger = logging.getLogger(__name__)

SAMPLE_EVERY_S = 1.0
ANSWER_S = 4.0
"""A scheduler that has not answered for this long is shown as silent."""
UPDATES_KEPT = 200
REBALANCES_KEPT = 400
EPOCHS_KEPT = 1000
WINDOW = 100
"""Forward passes over which expert loads are shown."""


class ServerHistory:
    """Use from the manager's event loop, with `run()` as a task of it.

    Tokens of samples are kept only where a key, or the reach of this machine alone, keeps strangers away.
    """

    def __init__(self, manager: TokenizerManager, metrics: Metrics) -> None:
        args = manager.server_args
        self.refusals = RefusalLog()
        self.probe = RouteProbe(manager)
        self.answers = AnswerLog(args.is_local or args.api_key is not None)
        self.state: SchedulerState | None = None  # the last one
        self.answered_at: float | None = None
        self.unanswered: str | None = None  # why the last question has no answer
        self._manager = manager
        self._latencies = LatencyWindow(metrics)
        self._machine = Machine()
        self._trainer = TrainerLog()
        self._count = 0
        self._samples = SampleTiers()
        self._epochs: deque[float] = deque(maxlen=EPOCHS_KEPT)  # when each of the last came, by the monotonic clock
        self._updates: deque[tuple[int, dict[str, Any]]] = deque(maxlen=UPDATES_KEPT)
        self._rebalances: deque[tuple[int, dict[str, Any]]] = deque(maxlen=REBALANCES_KEPT)
        self._flips: deque[tuple[int, dict[str, Any]]] = deque(maxlen=UPDATES_KEPT)
        self._probing: asyncio.Task[None] | None = None
        if args.enable_metrics:
            manager.observe(self.answers)

    async def run(self) -> None:
        """Sample until cancelled.  An error costs one sample."""
        try:
            while True:
                try:
                    await self.sample()
                except Exception:
                    logger.exception("the dashboard has no sample of this second")
                await asyncio.sleep(SAMPLE_EVERY_S)
        finally:
            if self._probing is not None:
                self._probing.cancel()
                await asyncio.gather(self._probing, return_exceptions=True)

    async def sample(self) -> None:
        """Ask once, and enter the answer."""
        if self._manager.phase not in (Phase.SERVING, Phase.STOPPING):
            return
        try:
            answer = await self._manager.communicator.call(GetStateReqInput, ANSWER_S)
            if not answer.success:
                raise LockstepError(answer.message)
        except (LockstepError, msgspec.ValidationError) as error:
            self.unanswered = str(error)
            return
        self.enter(answer.reply, time.time())
        if self._manager.phase is Phase.SERVING and (self._probing is None or self._probing.done()):
            self._probing = asyncio.create_task(self._probe(answer.reply))

    async def _probe(self, state: SchedulerState) -> None:
        flip = await self.probe.follow(state)
        if flip is not None:
            self._flips.append((self._next(), asdict(flip)))

    def enter(self, state: SchedulerState, now: float) -> None:
        """Take one state of the scheduler; `now` in seconds since 1970."""
        self._enter_sample(state, now)
        known = {(update["update_id"], update["ended_at"]) for _, update in self._updates}
        for update in state.ended_updates:
            if (update.update_id, update.ended_at) not in known:
                self._updates.append((self._next(), msgspec.structs.asdict(update)))
        if state.eplb is not None:
            self._enter_rebalances(state.eplb, now)
        self.state, self.answered_at, self.unanswered = state, now, None

    def _enter_sample(self, state: SchedulerState, now: float) -> None:
        before = self.state
        rates: dict[str, Any] = {}
        if before is not None and self.answered_at is not None and now > self.answered_at:
            rates = _rates(before, state, now - self.answered_at)
        self._note_epoch(before, state)
        percentiles: dict[str, Any] = {**self._latencies.percentiles(now)}
        sample = Sample(
            at=round(now, 3),
            **{name: rates.get(name, 0.0) for name in RATES},
            **self._of_answers(rates.get("seconds", 0.0)),
            **percentiles,
            running=state.num_running_reqs,
            waiting=state.num_waiting_reqs,
            used_tokens=state.num_used_tokens,
            used_state_rows=state.num_used_state_rows,
            paused=state.paused,
            weight_epoch=state.weight_epoch,
            balance=_balance(None if before is None else before.expert_distribution, state.expert_distribution),
            age_running=self._age_running(),
            **self._of_machine(now),
        )
        self._samples.append(self._next(), sample)

    def _note_epoch(self, before: SchedulerState | None, state: SchedulerState) -> None:
        self.answers.weight_epoch = state.weight_epoch
        if before is not None and before.weight_epoch < state.weight_epoch:
            num_new = min(state.weight_epoch - before.weight_epoch, EPOCHS_KEPT)
            self._epochs.extend([time.monotonic()] * num_new)

    def _age_running(self) -> tuple[float, float] | None:
        """Return the mean and the largest number of versions that came into force since a sample in flight arrived."""
        arrivals = self._manager.arrivals_in_flight()
        if not arrivals:
            return None
        epochs = list(self._epochs)
        ages = [len(epochs) - bisect.bisect_right(epochs, arrival) for arrival in arrivals] if epochs else [0]
        return round(sum(ages) / len(ages), 3), max(ages)

    def _of_answers(self, seconds: float) -> dict[str, Any]:
        """Return what the samples that ended since the last call were like."""
        sums = self.answers.taken()
        return {
            "finished_per_s": round(sums.num_finished / seconds, 2) if seconds else 0.0,
            "aborted_per_s": round(sums.num_aborted / seconds, 2) if seconds else 0.0,
            "age_returned": (round(sums.age_sum / sums.aged_tokens, 3), sums.max_age) if sums.aged_tokens else None,
            "logprob": round(sums.logprob_sum / sums.logprob_tokens, 4) if sums.logprob_tokens else None,
            "entropy": round(sums.entropy_sum / sums.entropy_tokens, 4) if sums.entropy_tokens else None,
        }

    def _of_machine(self, now: float) -> dict[str, Any]:
        usage = self._machine.look(now)
        return {} if usage is None else {"memory_bytes": (usage.own_bytes, usage.engine_bytes), "cpus": usage.cpus}

    def _enter_rebalances(self, eplb: EplbState, now: float) -> None:
        """Enter the rebalances that ended after the last known one, and that one again once its effect was measured."""
        last = self._rebalances[-1][1] if self._rebalances else None
        for facts in eplb.rebalances:
            new = _rebalance(facts)
            if last is None or facts["number"] > last["number"]:
                self._rebalances.append((self._next(), new | {"ended_at": round(now - facts["age_s"], 3)}))
            elif facts["number"] == last["number"] and new["balancedness_measured"] != last["balancedness_measured"]:
                self._rebalances[-1] = (self._next(), last | {"balancedness_measured": new["balancedness_measured"]})

    def note_training(self, values: Mapping[str, float], step: int | None) -> TrainerReport:
        """Keep the numbers that a trainer posts.  Raises `BadRequest` as `TrainerLog.add` does."""
        return self._trainer.add(self._next(), values, step, self._manager.weight_version)

    def _next(self) -> int:
        self._count += 1
        return self._count

    def since(self, count: int) -> dict[str, Any]:
        """Return the entries after number `count`, oldest first.  Pass `count` of the reply in the next call."""
        return {
            "count": self._count,
            "samples": self._samples.newer(count),
            "updates": _newer(self._updates, count),
            "rebalances": _newer(self._rebalances, count),
            "flips": _newer(self._flips, count),
            "trainer": self._trainer.newer(count),
            "refusals": self.refusals.entries(),
        }


RATES = ("generated_per_s", "prefilled_per_s", "reused_per_s", "retracted_per_s")


def _rates(before: SchedulerState, state: SchedulerState, seconds: float) -> dict[str, float]:
    """Return the rates between two states that are `seconds` apart, and these seconds."""
    reused = state.num_prompt_tokens_reused - before.num_prompt_tokens_reused
    counts = {
        "generated_per_s": state.num_generated_tokens - before.num_generated_tokens,
        "prefilled_per_s": state.num_prompt_tokens - before.num_prompt_tokens - reused,
        "reused_per_s": reused,
        "retracted_per_s": state.num_retracted_reqs - before.num_retracted_reqs,
    }
    return {name: round(count / seconds, 1) for name, count in counts.items()} | {"seconds": seconds}


def _newer(entries: Iterable[tuple[int, Any]], count: int) -> list[Any]:
    return [entry for number, entry in entries if number > count]


def _balance(before: ExpertLoadState | None, record: ExpertLoadState | None) -> list[float | None] | None:
    """Return the balancedness of each MoE layer: of its ranks or, where there is one rank, of its expert slots.

    Returns None while nothing is recorded, or if no pass has come since `before`.
    """
    if record is None or not record.recording:
        return None
    if before is not None and before.num_passes == record.num_passes:
        return None
    window = record.windows[0]
    is_alone = all(len(loads) == 1 for loads in window.rank_loads)
    values = window.slot_balancedness if is_alone else window.rank_balancedness
    return [None if value is None else round(value, 3) for value in values]


def _rebalance(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a rebalance that the page shows: its decision and its outcome."""
    names = (
        *("number", "reason", "algorithm", "num_experts_moved", "num_bytes"),
        *("num_chunks", "chunks_done", "seconds", "longest_chunk_s", "dropped"),
    )
    balances = ("balancedness_before", "balancedness_after", "balancedness_measured")
    balance = {name: (facts.get(name) or {}).get("mean") for name in balances}
    return {name: facts[name] for name in names} | balance | {"num_local_copies": facts.get("num_local_copies", 0)}

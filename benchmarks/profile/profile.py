"""Runs of the engine, and the sums of their measurements: decode steps of a batch, and passes over one prompt.

Steps run undisturbed, but for some whose operators are watched by Python.  A forward that is played from its tape
records the times of its operators itself, in undisturbed steps.  Watched steps give the bytes, the operations and
the times of all other operators.  All times are medians; operators' times are added up, so that sums are the sums of
their parts.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median, quantiles

from benchmarks.profile.flags import WATCHED_EVERY
from benchmarks.profile.machine import Machine, measure_reading
from benchmarks.profile.operators import OperatorTimer, OperatorUse
from benchmarks.profile.steps import FORWARD, PLAYED, SECTIONS, Step, StepRecorder, num_decoding
from rollout.core.messages.io_struct import FlushCacheReqInput
from rollout.executor.recorded_forward import Tape
from rollout.scheduler.stats import StepStats
from rollout.server.engine import Engine

PREFILL_PASSES = 6  # half of them watched, after one to warm up
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class PhaseTime:
    """A phase of a step: its undisturbed seconds, and the seconds that its operators take."""

    name: str
    seconds: float
    operator_seconds: float

    @property
    def python_seconds(self) -> float:
        return self.seconds - self.operator_seconds


@dataclass(frozen=True)
class Profile:
    """One kind of work.  `tokens` and all numbers below are of one unit: a decode step, or a whole prompt."""

    kind: str  # "decode" or "prefill"
    batch_size: int
    tokens: int
    seconds: float
    spread: float  # distance of the quartiles of the undisturbed units, as a part of `seconds`
    phases: list[PhaseTime]
    operators: dict[str, OperatorUse]  # the slowest first
    num_undisturbed: int
    num_watched: int
    played: bool  # from a tape: operators of the forward were timed in the undisturbed units, else in watched ones
    read_bytes_per_s: tuple[float, float]  # of the machine right before, which the roofline takes, and right after

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def operator_seconds(self) -> float:
        return sum(use.seconds for use in self.operators.values())


@dataclass(frozen=True)
class Workload:
    """The shape of the requests."""

    input_len: int
    output_len: int
    temperature: float
    vocab_size: int


class Profiler:
    """Owns an engine's time for as long as it is used."""

    def __init__(self, engine: Engine, machine: Machine, workload: Workload, advance: Callable[[], None]) -> None:
        """Take an engine over.  `advance` is called after every run of it; `runs_of` counts the runs."""
        self._engine = engine
        self._workload = workload
        self._advance = advance
        self._timer = OperatorTimer(machine)
        self._rng = random.Random(0)

    def decode(self, batch_size: int) -> Profile:
        """Measure steps in which `batch_size` requests decode and nothing else happens."""
        work = self._workload
        self._run([work.input_len] * batch_size, WARM_UP_TOKENS)
        chunk = self._engine.server_args.step_prompt_tokens
        new_tokens = work.output_len + decode_head_start(batch_size, work.input_len, chunk)
        before = self._measure_reading()
        steps = self._run([work.input_len] * batch_size, new_tokens, lambda i: i % WATCHED_EVERY == 0)
        # The last step also ends all requests; the one before a change of the batch is like any other.
        units = [s for s in steps[:-1] if s.num_decodes == batch_size]
        return summarise("decode", batch_size, batch_size, units, (before, measure_reading()))

    def prefill(self, num_tokens: int) -> Profile:
        """Measure whole passes over one prompt, in as many steps as the chunk size makes of it."""
        units = []
        before = self._measure_reading()
        for turn in range(-1, PREFILL_PASSES):
            watched = turn % 2 == 1
            first, *others = self._run([num_tokens], 1, lambda _, watched=watched: watched)  # type: ignore[misc]
            for step in others:
                first.add(step)
            if turn >= 0:
                units.append(first)
        return summarise("prefill", 1, num_tokens, units, (before, measure_reading()))

    def _measure_reading(self) -> float:
        rate = measure_reading()
        self._timer.machine = replace(self._timer.machine, read_bytes_per_s=rate)
        return rate

    def _run(
        self, lengths: Sequence[int], new_tokens: int, watch: Callable[[int], bool] = lambda _: False
    ) -> list[Step]:
        engine, work = self._engine, self._workload
        prompts = [[self._rng.randrange(work.vocab_size) for _ in range(length)] for length in lengths]
        recorder = StepRecorder(partial(num_decoding, engine.scheduler.queues), self._timer, watch)
        engine.scheduler.stats = recorder
        recorded = engine.scheduler.runner.recorded
        if recorded is not None:
            recorded.play = recorder.play
        try:
            engine.generate(
                input_ids=prompts,
                sampling_params={
                    "temperature": work.temperature,
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                },
            )
        finally:
            recorder.close()
            engine.scheduler.stats = StepStats()
            if recorded is not None:
                recorded.play = Tape.play
        engine.control(FlushCacheReqInput)
        self._advance()
        return recorder.steps


def runs_of(num_batches: int, prefill: bool) -> int:
    """Return how often a `Profiler` calls `advance` for `num_batches` batch sizes, and a prefill."""
    return 2 * num_batches + (PREFILL_PASSES + 1) * prefill


def decode_head_start(batch_size: int, input_len: int, chunk: int) -> int:
    """Return the most tokens that the first request can have sampled when the last prompt is done."""
    return 1 + (math.ceil(batch_size * input_len / chunk) if chunk > 0 else batch_size)


def summarise(kind: str, batch_size: int, tokens: int, units: list[Step], reading: tuple[float, float]) -> Profile:
    """Return a profile of medians over undisturbed and over watched units; there must be two or more of both."""
    undisturbed = [unit for unit in units if unit.uses is None]
    watched = [unit.uses for unit in units if unit.uses is not None]
    assert min(len(undisturbed), len(watched)) >= 2, (kind, batch_size, len(units))
    by_phase = {key: _typical([uses.get(key, OperatorUse()) for uses in watched]) for uses in watched for key in uses}
    played = [unit.played_seconds() for unit in undisturbed]
    for phase, name in by_phase:
        if phase == PLAYED and all(played):
            by_phase[phase, name].seconds = median(seconds.get(name, 0.0) for seconds in played)
    operators: dict[str, OperatorUse] = defaultdict(OperatorUse)
    for (_, operator), use in by_phase.items():
        operators[operator].add(use)
    totals = [unit.total_seconds for unit in undisturbed]
    first, middle, third = quantiles(totals, n=4, method="inclusive")
    return Profile(
        kind=kind,
        batch_size=batch_size,
        tokens=tokens,
        seconds=middle,
        spread=(third - first) / middle,
        phases=[
            PhaseTime(
                name,
                median(unit.seconds[name] for unit in undisturbed),
                sum(use.seconds for (phase, _), use in by_phase.items() if section_of(phase) == name),
            )
            for name in SECTIONS
        ],
        operators=dict(sorted(operators.items(), key=lambda item: -item[1].seconds)),
        num_undisturbed=len(undisturbed),
        num_watched=len(watched),
        played=all(played),
        read_bytes_per_s=reading,
    )


def section_of(phase: str) -> str:
    """Return the section of a key of `Step.uses`."""
    return FORWARD if phase == PLAYED else phase


def _typical(uses: list[OperatorUse]) -> OperatorUse:
    """Return the median of the seconds, which depend on the machine's moods, and the mean of all other numbers."""
    return OperatorUse(
        calls=fmean(use.calls for use in uses),
        seconds=median(use.seconds for use in uses),
        least_seconds=fmean(use.least_seconds for use in uses),
        bytes_moved=fmean(use.bytes_moved for use in uses),
        flops=fmean(use.flops for use in uses),
    )

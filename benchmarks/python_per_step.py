"""The cost outside the operators of a step that only decodes.

It is the time of a turn of the scheduler's loop, less the time inside the compiled operators, turn by turn.

    turn = messages in, plan, build, forward, process, messages out
    operators = from the call of an operator of layers, attention or sampling to its return

Few torch calls outside those operators (an index, a copy) count as Python, and so does the clock: about 0.3
microseconds an operator.  The shown cost is hence an upper bound.  It is a median, so that a turn in which the machine
was busy elsewhere does not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch._ops import OpOverload

from rollout.executor.recorded_forward import RecordedForward, Tape
from rollout.kernels.operators import OPERATORS
from rollout.kernels.ops import Ops
from rollout.layers.layer import Layer
from rollout.scheduler.stats import PHASES
from rollout.server.engine import Engine

BASE_US = 150.0  # what a step may cost outside the operators, and on top of it each running request
PER_REQUEST_US = 2.0
STEPS = 96


@dataclass(frozen=True)
class StepCost:
    """Medians over turns, in microseconds.  `phases` are wall time, operators included; `calls` of operators a turn."""

    batch: int
    turn_us: float
    operators_us: float
    python_us: float
    calls: float
    phases_us: dict[str, float]

    @property
    def bound_us(self) -> float:
        return BASE_US + PER_REQUEST_US * self.batch


class OperatorClock:
    """A clock that stands in the place of every operator that `owners` hold, and plays the tapes of a forward.

    It adds up the time inside the operators.
    """

    def __init__(self, owners: list[Any]) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._places = [
            (owner, name, value)
            for owner in owners
            for name, value in vars(owner).items()
            if isinstance(value, OpOverload | Ops) or (isinstance(owner, RecordedForward) and name == "play")
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        for owner, name, value in self._places:
            setattr(owner, name, self._instead_of(value))
        try:
            yield
        finally:
            for owner, name, value in self._places:
                setattr(owner, name, value)

    def _instead_of(self, value: Any) -> Any:
        if value is Tape.play:
            return self._play
        if not isinstance(value, Ops):
            return self._timed(value)
        return value.replace(**{name: self._timed(getattr(value, name)) for name in (*OPERATORS, "rest")})

    def take(self) -> tuple[float, int]:
        """Return the seconds and calls since the last take."""
        taken = self.seconds, self.calls
        self.seconds, self.calls = 0.0, 0
        return taken

    def _play(self, tape: Tape, inputs: list[torch.Tensor]) -> torch.Tensor:
        result, nanoseconds = tape.play_clocked(inputs)
        self.seconds += 1e-9 * sum(nanoseconds)
        self.calls += len(nanoseconds)
        return result

    def _timed(self, operator: Callable) -> Callable:
        def call(*args: Any) -> Any:
            start = perf_counter()
            result = operator(*args)
            self.seconds += perf_counter() - start
            self.calls += 1
            return result

        return call


def measure(engine: Engine, batch: int, prompt_tokens: int, vocab_size: int) -> StepCost:
    """Run `batch` requests of `prompt_tokens` random tokens; greedy, without log-probabilities."""
    scheduler = engine.scheduler
    clock = OperatorClock(owners(engine))
    rng = random.Random(batch)
    turns: list[tuple[float, float, int, dict[str, float]]] = []
    tick = scheduler.tick

    def timed_tick(wait_ms: int) -> bool:
        generation = scheduler.queues.running.generation
        clock.take()
        before = dict(scheduler.stats.seconds)
        start = perf_counter()
        ran = tick(wait_ms)
        elapsed = perf_counter() - start
        seconds, calls = clock.take()
        if ran and len(scheduler.queues.running) == batch and generation == scheduler.queues.running.generation:
            phases = {name: scheduler.stats.seconds[name] - before[name] for name in PHASES}
            turns.append((elapsed, seconds, calls, phases))
        return ran

    scheduler.tick = timed_tick  # type: ignore[method-assign]
    try:
        with clock.running():
            engine.generate(
                input_ids=[[rng.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)],
                sampling_params={"temperature": 0.0, "max_new_tokens": STEPS, "ignore_eos": True},
            )
    finally:
        del scheduler.tick
    assert turns and all(calls for _, _, calls, _ in turns), "operators were not seen"
    return StepCost(
        batch=batch,
        turn_us=1e6 * median(turn for turn, _, _, _ in turns),
        operators_us=1e6 * median(inside for _, inside, _, _ in turns),
        python_us=1e6 * median(turn - inside for turn, inside, _, _ in turns),
        calls=median(calls for _, _, calls, _ in turns),
        phases_us={name: 1e6 * median(phases[name] for *_, phases in turns) for name in PHASES},
    )


def owners(engine: Engine) -> list[Any]:
    """Return the objects that hold compiled operators: layers, the attention backend, the sampler, and the tapes."""
    scheduler = engine.scheduler
    runner = scheduler.runner
    model = runner.state.model
    assert isinstance(model, Layer)
    layers = [layer for _, layer in model.named_layers() if hasattr(layer, "ops")]
    return [*layers, runner.attention, scheduler._steps._sampler, runner.recorded]

"""Step statistics that keep every step by itself, and can watch some steps operator by operator.

Where a forward was played from its tape, the step has the time of each of its operators.  The statistics are to be put
in the place of `Scheduler.stats`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from benchmarks.profile.operators import OperatorTimer, OperatorUse, operator_name
from rollout.executor.recorded_forward import Tape
from rollout.scheduler.policy import RequestQueues
from rollout.scheduler.stats import PHASES, StepStats

BETWEEN = "between steps"  # messages in, the engine's own loop
SECTIONS = (*PHASES, BETWEEN)
FORWARD = "forward"  # of the phases
PLAYED = "played"  # the part of it that a tape calls


@dataclass(slots=True)
class Step:
    """One step, or several added up.

    `num_decodes` counts the requests that decode, 0 if there are prompts in the step.  `uses` is by (phase, operator),
    with `PLAYED` for a phase inside a tape, and None for a step whose operators were not watched.  `tapes` has for
    any step the operators of every tape that was played, and their nanoseconds.
    """

    num_decodes: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    uses: dict[tuple[str, str], OperatorUse] | None = None
    tapes: list[tuple[Sequence[Any], Sequence[int]]] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def played_seconds(self) -> dict[str, float]:
        """Return the seconds by operator; empty where no tape was played."""
        seconds: dict[str, float] = defaultdict(float)
        for operators, nanoseconds in self.tapes:
            for operator, each in zip(operators, nanoseconds, strict=True):
                seconds[operator_name(operator)] += 1e-9 * each
        return seconds

    def add(self, other: Step) -> None:
        """Add another step to this one.  `other` was watched if this one was."""
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds
        self.tapes += other.tapes
        if self.uses is not None and other.uses is not None:
            for key, use in other.uses.items():
                self.uses.setdefault(key, OperatorUse()).add(use)


def num_decoding(queues: RequestQueues) -> int:
    """Return how many requests decode in the next step; 0 if there will be prompts in it."""
    return 0 if queues.waiting or queues.partial else len(queues.running)


class StepRecorder(StepStats):
    """`decoding` is asked before each step for its `num_decodes`; `watch` chooses steps by their index."""

    def __init__(
        self, decoding: Callable[[], int], timer: OperatorTimer, watch: Callable[[int], bool] = lambda _: False
    ) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._decoding = decoding
        self._timer = timer
        self._watch = watch
        self._step = Step(0)
        self._ended: float | None = None
        self._watching = ExitStack()

    def play(self, tape: Tape, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Play a tape and keep its operators' times, in the place of `RecordedForward.play`."""
        before = self._timer.take()
        result, nanoseconds = tape.play_clocked(inputs)
        self._step.tapes.append((tape.operators, nanoseconds))
        self._note(PLAYED, self._timer.take())
        self._timer.put_back(before)
        return result

    def close(self) -> None:
        """Stop watching, also in the middle of a step."""
        self._watching.close()

    def start_step(self) -> None:
        self.close()
        self._step = Step(self._decoding())
        if self._watch(len(self.steps)):
            self._step.uses = {}
            self._watching.enter_context(self._timer)
        if self._ended is not None:
            self.steps[-1].seconds[BETWEEN] += perf_counter() - self._ended
            self._ended = None
        super().start_step()

    def phase(self, name: str) -> None:
        before = self.seconds[name]
        super().phase(name)
        self._step.seconds[name] += self.seconds[name] - before
        self._note(name, self._timer.take())

    def end_step(self, generated: int) -> None:
        super().end_step(generated)
        self.close()
        self.steps.append(self._step)
        self._ended = perf_counter()

    def _note(self, phase: str, uses: dict[str, OperatorUse]) -> None:
        if self._step.uses is not None:
            for operator, use in uses.items():
                self._step.uses.setdefault((phase, operator), OperatorUse()).add(use)


class TracedSteps(StepStats):
    """`stats` of a scheduler whose steps and phases become ranges in torch's profiler."""

    def __init__(self) -> None:
        super().__init__()
        self._step = ExitStack()
        self._phase = ExitStack()

    def start_step(self) -> None:
        self.close()
        self._step.enter_context(record_function("step"))
        self._phase.enter_context(record_function(PHASES[0]))
        super().start_step()

    def phase(self, name: str) -> None:
        """End the range of the phase `name`, and begin the range of the next one."""
        super().phase(name)
        self._phase.close()
        following = PHASES.index(name) + 1
        if following < len(PHASES):
            self._phase.enter_context(record_function(PHASES[following]))

    def end_step(self, generated: int) -> None:
        super().end_step(generated)
        self.close()

    def close(self) -> None:
        self._phase.close()
        self._step.close()

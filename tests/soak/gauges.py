"""The usage of the server's processes over time: memory, descriptors, log, step time; and whether it grew.

Curves are for the picture.  The verdict takes the moments of rest between rounds, when no request, connection, group or
update is left.  Memory that is used then is kept for good.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.abuse.usage import MB, Usage, process_tree, usage_of

SPARE_MEMORY = 0.06
"""Share by which memory at rest may grow from the second round on: allocators keep their peak."""
SPARE_BYTES = 24 * MB
SPARE_DESCRIPTORS = 2
DESCRIPTORS_OF_GROUP = 5
"""Further descriptors of each rank: a process group that failed lives until Python collects garbage."""


@dataclass
class Curves:
    """`at`: seconds since the start; `step_ms`: mean of the steps since the point before, None without any.

    `rest`: the moments of rest.
    """

    at: list[float] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    step_ms: list[float | None] = field(default_factory=list)
    rest: list[tuple[float, Usage]] = field(default_factory=list)


class Gauges:
    """A thread that looks every `every_s` seconds, until `stop`, at a process and its children.

    `state`: the scheduler's own numbers, or None.
    """

    def __init__(self, pid: int, state: Callable[[], dict[str, Any] | None], every_s: float) -> None:
        self._pid, self._state, self._every_s = pid, state, every_s
        self._start = time.monotonic()
        self._steps = (0.0, 0.0)  # the number of steps so far, and their milliseconds
        self.curves = Curves()
        self._over = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def started(self) -> float:
        return self._start

    def quiet(self) -> threading.Lock:
        """Return a lock under which the gauges ask the server for nothing."""
        return self._looking

    def rest(self) -> Usage:
        """Note a moment of rest."""
        usage = usage_of(process_tree(self._pid))
        self.curves.rest.append((time.monotonic() - self._start, usage))
        return usage

    def stop(self) -> None:
        self._over.set()
        self._thread.join(30)

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            with self._looking:
                state = self._state()
            if state is None:
                continue
            curves = self.curves
            curves.at.append(time.monotonic() - self._start)
            curves.usage.append(usage_of(process_tree(self._pid)))
            curves.step_ms.append(self._step_ms(state["step_time_ms"]))

    def _step_ms(self, said: dict[str, float]) -> float | None:
        steps = said["steps"]
        total = steps * sum(value for name, value in said.items() if name != "steps")
        before, self._steps = self._steps, (steps, total)
        return (total - before[1]) / (steps - before[0]) if steps > before[0] else None


@dataclass(frozen=True)
class Growth:
    """The growth between an early and a late moment of rest; `most`: the allowed growth."""

    early: float
    late: float
    most: float

    @property
    def ok(self) -> bool:
        return self.late - self.early <= self.most


def memory_growth(rest: Sequence[Usage]) -> Growth:
    early, late = _early_and_late([usage.rss for usage in rest])
    return Growth(early, late, max(SPARE_BYTES, SPARE_MEMORY * early))


def descriptor_growth(rest: Sequence[Usage], ranks: int) -> Growth:
    most = SPARE_DESCRIPTORS + DESCRIPTORS_OF_GROUP * ranks
    return Growth(*_early_and_late([usage.descriptors for usage in rest]), most)


def _early_and_late(values: Sequence[float]) -> tuple[float, float]:
    """Return medians of the first and the last third of the moments, without the first: it is before caches fill."""
    known = values[1:] if len(values) > 2 else values
    part = max(1, len(known) // 3)
    return statistics.median(known[:part]), statistics.median(known[-part:])

"""`Machine`: memory and processor time of this process and of its children, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Usage(NamedTuple):
    """Resident bytes of this process and of all its children; `cpus`: busy cores since the look before.

    Pages that processes share are counted in each of them.  `cpus` is None at the first look.
    """

    own_bytes: int
    engine_bytes: int
    cpus: float | None


class Machine:
    """Reads /proc at each look.  Where there is none, as on macOS, nothing is known."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._last: tuple[float, dict[int, int]] | None = None  # time, ticks by process

    def look(self, now: float) -> Usage | None:
        """Return the usage since the look before; `now`: seconds of any clock that goes on."""
        try:
            own = _facts(self._pid)
        except (OSError, ValueError, IndexError):
            return None
        ticks, engine_bytes = {self._pid: own[1]}, 0
        for pid in _descendants(self._pid):
            try:
                num_bytes, ticks[pid] = _facts(pid)
            except (OSError, ValueError, IndexError):
                continue  # it has just ended
            engine_bytes += num_bytes
        cpus = None
        if self._last is not None and now > self._last[0]:
            before = self._last[1]
            spent = sum(count - before.get(pid, count) for pid, count in ticks.items())
            cpus = round(spent / os.sysconf("SC_CLK_TCK") / (now - self._last[0]), 2)
        self._last = (now, ticks)
        return Usage(own[0], engine_bytes, cpus)


def _facts(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process and its ticks of processor time."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), int(fields[11]) + int(fields[12])


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        try:
            tasks = list((PROC / str(waiting.pop()) / "task").iterdir())
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except (OSError, ValueError):
            continue
        found += children
        waiting += children
    return found

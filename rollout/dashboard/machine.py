"""`Machine`: memory and processor time of this process and of its children, from /proc."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

LOOKS_PER_SEARCH = 30
"""Looks until children are searched for again: a search reads a file for each thread of each process."""


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
        self._children: list[int] = []
        self._looks_left = 0  # until the next search

    def look(self, now: float) -> Usage | None:
        """Return the usage since the look before; `now`: seconds of any clock that goes on."""
        try:
            own = _facts(self._pid)
        except (OSError, ValueError, IndexError):
            return None
        if not self._looks_left:
            self._children, self._looks_left = _descendants(self._pid), LOOKS_PER_SEARCH
        self._looks_left -= 1
        ticks, engine_bytes = {self._pid: own[1]}, 0
        for pid in self._children:
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
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), int(fields[11]) + int(fields[12])


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has just ended
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has
                found += [int(child) for child in _read(f"/proc/{pid}/task/{task.name}/children").split()]
    return found


def _read(path: str) -> bytes:
    """Return the content of a file of /proc, without the objects of `open`: there may be a thousand."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)

"""Progress of a long run: bars on a terminal, elsewhere lines that never stay away for more than ten seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 5.0
QUIET_S = 8.0


class Shown(Protocol):
    """The display that a run reports to."""

    def line(self, text: str) -> None:
        """Print an event, with the time since the start."""

    def doing(self, work: str) -> None:
        """Name the present work."""

    def report(self, phase: str, done: int, total: int, note: str) -> None:
        """Report how much of a phase is done, and a note to show with it."""


@contextlib.contextmanager
def progress(console: Console, quiet_s: float = QUIET_S) -> Iterator[Shown]:
    """Show inside the block what is reported to the object that it yields.

    Without a terminal, a line repeats the last report or work once nothing was printed for `quiet_s` seconds.
    """
    with _Bars(console) if console.is_terminal else _Lines(console, quiet_s) as shown:
        yield shown


class _Clock:
    """The time since the start, as lines show it."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __str__(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"[{minutes:2d}:{seconds:02d}]"


class _Bars:
    """A bar for each phase, and a row that names the present work; lines are printed above them."""

    def __init__(self, console: Console) -> None:
        self._clock = _Clock()
        columns = (TextColumn("{task.description:<17}"), BarColumn(), TextColumn("{task.fields[count]}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console)
        self._tasks: dict[str, TaskID] = {}
        self._work: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._work is not None:
            self._bars.remove_task(self._work)
        self._bars.stop()

    def line(self, text: str) -> None:
        self._bars.console.print(f"{self._clock} {text}", highlight=False, markup=False)

    def doing(self, work: str) -> None:
        if self._work is None:
            self._work = self._bars.add_task("now", total=None, count="", note=work)
        self._bars.update(self._work, note=work)

    def report(self, phase: str, done: int, total: int, note: str) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total, count="", note="")
        self._bars.update(self._tasks[phase], completed=done, count=f"{done}/{total}", note=note)


class _Lines:
    """A line for each event.  Of reports: one at most every `LINE_EVERY_S` seconds, and one at the end of a phase."""

    def __init__(self, console: Console, quiet_s: float) -> None:
        self._console = console
        self._quiet_s = quiet_s
        self._clock = _Clock()
        self._printed = time.monotonic()
        self._work = "starting"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def line(self, text: str) -> None:
        with self._lock:
            self._print(text)

    def doing(self, work: str) -> None:
        self._work = work

    def report(self, phase: str, done: int, total: int, note: str) -> None:
        with self._lock:
            self._work = f"{phase} {done}/{total}: {note}"
            if done == total or time.monotonic() - self._printed >= LINE_EVERY_S:
                self._print(self._work)

    def _repeat(self) -> None:
        while not self._ended.wait(max(self._printed + self._quiet_s - time.monotonic(), 0.05)):
            with self._lock:
                if time.monotonic() - self._printed >= self._quiet_s:
                    self._print(f"{self._work} ...")

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        self._console.print(f"{self._clock} {text}", highlight=False, markup=False)

"""Progress of a long run: bars on a terminal, elsewhere lines that never stay away for more than ten seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 5.0
SILENCE_S = 9.0

Report = Callable[[str, int, int, str], None]
"""Takes the phase, how much of it is done, how much there is, and a note to show with it."""


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Report]:
    """Show inside the block what is reported to the call that it yields."""
    with _bars(console) if console.is_terminal else _Lines(console) as report:
        yield report


@contextlib.contextmanager
def _bars(console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description:<17}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done: int, total: int, note: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total, note="")
            bars.update(tasks[phase], completed=done, note=note)

        yield report


class _Lines:
    """A line at most every `LINE_EVERY_S`, and at the end of a phase; if nothing was reported, after `SILENCE_S`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._printed = time.monotonic()
        self._line = "starting"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_talking, daemon=True)

    def __enter__(self) -> Report:
        self._thread.start()
        return self._report

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _report(self, phase: str, done: int, total: int, note: str) -> None:
        with self._lock:
            self._line = f"{phase} {done}/{total}: {note}"
            if done == total or time.monotonic() - self._printed >= LINE_EVERY_S:
                self._print(self._line)

    def _keep_talking(self) -> None:
        while not self._ended.wait(0.2):
            with self._lock:
                if time.monotonic() - self._printed >= SILENCE_S:
                    self._print(f"{self._line} (at work for {time.monotonic() - self._started:.0f} s)")

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        self._console.print(line, highlight=False, markup=False)

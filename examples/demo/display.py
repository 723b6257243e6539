"""The output of the demo: progress of its phases, and the table at the end.

Without a terminal, progress is a line where a phase begins and one where it ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.demo.checks import Row


class Display(Protocol):
    """Progress of phases, one after the other.  Leaving it stops every animation."""

    def update(self, phase: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` parts are done; None means that the total is not known."""

    def finish(self, phase: str) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_display(console: Console) -> Display:
    """Return a display that shows bars on a terminal, and lines elsewhere."""
    return _Bars(console) if console.is_terminal else _Lines(console)


class _Bars:
    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, phase: str, done: int, total: int | None) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total)
        self._progress.update(self._tasks[phase], completed=done, total=total)

    def finish(self, phase: str) -> None:
        self.update(phase, 1, 1)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}

    def update(self, phase: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if phase not in self._started:
            self._started[phase] = now
            self._say(f"{phase} ...")
        if total is not None and done >= total:
            self._say(f"{phase}: done in {now - self._started[phase]:.1f} s")

    def finish(self, phase: str) -> None:
        self.update(phase, 1, 1)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def results_table(
    rows: Sequence[Row], title: str = "One step of reinforcement learning, engine (bfloat16) and trainer (float32)"
) -> Table:
    """Return a table of the rows, divided into their sections.

    The last column is `ok` or `FAILED`, and empty for rows without a bound.
    """
    table = Table(title=title)
    table.add_column("fact", overflow="fold")  # the one column that gives way on a narrow terminal
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("check", no_wrap=True)
    section = None
    for row in rows:
        if row.section != section:
            table.add_section()
            table.add_row(Text(row.section, style="bold"), "", "", "")
            section = row.section
        table.add_row(Text(f"  {row.name}"), Text(row.value), Text(row.bound), _verdict(row.ok))
    return table


def _verdict(ok: bool | None) -> Text:
    if ok is None:
        return Text("")
    return Text("ok", style="green") if ok else Text("FAILED", style="bold red")

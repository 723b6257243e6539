"""The output of the example: a live view, or without a terminal a line for each event, and the tables at the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.fleet.events import Event
from examples.fleet.sample import Sample

LAST_EVENTS = 12


class View:
    """The live view of a run.  Leaving it stops every animation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._events: list[Event] = []
        self._counts: Counter[str] = Counter()
        self._versions: dict[str, int] = {}
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("start", total=None, said="")
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def phase(self, name: str, done: float = 0, total: float | None = None, said: str = "") -> None:
        """Show what goes on, and how far it is."""
        if not self._console.is_terminal and name != self._progress.tasks[0].description:
            self._say(f"{name} ...")
        self._progress.update(self._task, description=name, completed=done, total=total, said=said)

    def happened(self, event: Event) -> None:
        self._events.append(event)
        if not self._console.is_terminal:
            version = "" if event.version is None else f", version {event.version}"
            self._say(f"{event.seconds:6.2f} s  {event.engine}: {event}{version}")

    def answered(self, sample: Sample) -> None:
        self._counts[sample.engine] += 1
        self._versions[sample.engine] = sample.spans[-1].version

    def _picture(self) -> Group:
        engines = Table("engine", "samples", "newest version", box=None, padding=(0, 3, 0, 0))
        for name, count in sorted(self._counts.items()):
            engines.add_row(name, str(count), str(self._versions[name]))
        return Group(self._progress, engines, events_table(self._events[-LAST_EVENTS:]))

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def events_table(events: Iterable[Event]) -> Table:
    """Return a table with a line for each event."""
    table = Table("seconds", "engine", "event", "version", title="Events")
    for event in events:
        version = "" if event.version is None else str(event.version)
        table.add_row(f"{event.seconds:.2f}", event.engine, str(event), version)
    return table


def engines_table(samples: Sequence[Sample]) -> Table:
    """Return a table of each engine's samples and the versions that made their tokens."""
    tokens: dict[str, Counter[int]] = defaultdict(Counter)
    for sample in samples:
        for span in sample.spans:
            tokens[sample.engine][span.version] += span.end - span.start
    table = Table("engine", "samples", "tokens", "versions", title="Versions seen")
    for name, versions in sorted(tokens.items()):
        count = sum(sample.engine == name for sample in samples)
        table.add_row(name, str(count), str(versions.total()), runs_of(versions))
    return table


def runs_of(versions: Iterable[int]) -> str:
    """Return versions as text, runs shortened: `0-3, 5`."""
    runs: list[list[int]] = []
    for version in sorted(versions):
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

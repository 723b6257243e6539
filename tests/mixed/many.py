"""Plays the schedules of many seeds, in one process or in several, with what has happened so far."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.mixed.checker import Tally
from tests.mixed.play import MixedFailed, play
from tests.mixed.schedule import schedule_of
from tests.mixed.zoo import Zoo

MOST_FAILURES = 10
_REPORT_EVERY_S = 60.0
_LOOK_EVERY_S = 5.0
_WARM_SEEDS = 500
"""Seeds of a process after which every model has been met, and the answers that are remembered are as many as ever."""


@dataclass
class Played:
    """One seed: what was checked, or what failed, and the resident memory of its process in MB."""

    seed: int
    process: int
    tally: Tally | None
    failure: str = ""
    memory: float = 0.0


@dataclass
class Report:
    """What a run came to.  `memory`: by process, MB after each of its seeds."""

    tally: Tally = field(default_factory=Tally)
    failures: list[str] = field(default_factory=list)
    memory: dict[int, list[float]] = field(default_factory=dict)

    def add(self, played: Played) -> None:
        self.memory.setdefault(played.process, []).append(played.memory)
        if played.tally is None:
            self.failures.append(played.failure)
        else:
            self.tally.add(played.tally)

    def memory_text(self) -> str:
        """Resident memory where it should not grow any more: the mean of the first and of the last tenth."""
        parts = []
        for sizes in self.memory.values():
            settled = sizes[_WARM_SEEDS:] or sizes[-1:]
            tenth = max(1, len(settled) // 10)
            first, last = settled[:tenth], settled[-tenth:]
            parts.append(f"{sum(first) / tenth:.0f} to {sum(last) / tenth:.0f} MB")
        return " and ".join(parts)


def run(zoo: Zoo, folder: Path, seeds: Sequence[int], num_processes: int) -> bool:
    """Play the schedules of `seeds`; models are in `folder`.  False: something differed, and was printed."""
    report, console, started = Report(), Console(), time.monotonic()
    reported = started
    _say(console, f"schedules of the seeds {seeds[0]}..{seeds[-1]}")
    with _progress(console) as progress:
        task = progress.add_task("schedules", total=len(seeds))
        for played in _played(zoo, folder, seeds, num_processes):
            report.add(played)
            progress.advance(task)
            if played.failure:
                _say(console, played.failure)
            if not console.is_terminal and time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                console.print(
                    f"{reported - started:.0f} s: {report.tally}", markup=False, highlight=False, soft_wrap=True
                )
            if len(report.failures) == MOST_FAILURES:
                break
    end = f"{len(report.failures)} failed" if report.failures else "nothing differs"
    text = f"{end} in {time.monotonic() - started:.0f} s: {report.tally}"
    _say(console, f"{text}\nmemory {report.memory_text()}")
    return not report.failures


def play_seed(seed: int, zoo: Zoo) -> Played:
    try:
        tally, failure = play(schedule_of(seed, zoo.shapes), zoo), ""
    except MixedFailed as failed:
        tally, failure = None, str(failed)
    return Played(seed, os.getpid(), tally, failure, resident_mb())


def resident_mb() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _played(zoo: Zoo, folder: Path, seeds: Sequence[int], num_processes: int) -> Iterator[Played]:
    """Each process plays every so many-th seed."""
    if num_processes == 1:
        yield from (play_seed(seed, zoo) for seed in seeds)
        return
    zoo.write_all()
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[Played] = context.Queue()
    parts = [seeds[number::num_processes] for number in range(num_processes)]
    processes = [context.Process(target=_play_part, args=(folder, part, results), daemon=True) for part in parts]
    for process in processes:
        process.start()
    try:
        for _ in seeds:
            yield _next_of(results, processes)
    finally:
        for process in processes:
            process.terminate()


def _next_of(results: multiprocessing.Queue[Played], processes: Sequence[BaseProcess]) -> Played:
    while True:
        try:
            return results.get(timeout=_LOOK_EVERY_S)
        except queue.Empty:
            ended = [process.exitcode for process in processes if process.exitcode]
            if ended:
                raise RuntimeError(f"a process that plays has ended with status {ended[0]}") from None


def _play_part(folder: Path, seeds: Sequence[int], results: multiprocessing.Queue[Played]) -> None:
    torch.set_num_threads(1)
    zoo = Zoo(folder)
    for seed in seeds:
        results.put(play_seed(seed, zoo))


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress

"""Plays the schedules of many seeds, in one process or in several, and shows the results so far."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.mixed.checker import Tally
from tests.mixed.play import MixedFailed, play
from tests.mixed.schedule import schedule_of
from tests.mixed.zoo import Zoo

MAX_FAILURES = 10
_REPORT_EVERY_S = 60.0
_LOOK_EVERY_S = 5.0
_MANY = 300
"""The number of schedules that a process must play for its memory to be judged; lasting engines are built before."""
_WARM = 100
"""The number of schedules after which no more answers are remembered."""
_MEMORY_EVERY = 20
_GROWTH = 0.06
"""The share by which memory may grow, for allocators; the soak grants servers as much."""


@dataclass
class Played:
    """One seed: the checks or the failure, and for some seeds the resident memory of the process, MB."""

    seed: int
    process: int
    tally: Tally | None
    failure: str = ""
    memory: float | None = None


@dataclass
class Report:
    """The result of a run.  `memory`: by process, each measurement in MB."""

    tally: Tally = field(default_factory=Tally)
    failures: list[str] = field(default_factory=list)
    memory: dict[int, list[float]] = field(default_factory=dict)

    def add(self, played: Played) -> None:
        if played.memory is not None:
            self.memory.setdefault(played.process, []).append(played.memory)
        if played.tally is None:
            self.failures.append(played.failure)
        else:
            self.tally.add(played.tally)

    def settled_memory(self) -> list[tuple[float, float]]:
        """Return the mean memory of each long-lived process over the first and over the last fifth of its time, MB."""
        found = []
        for sizes in self.memory.values():
            if len(sizes) >= _MANY // _MEMORY_EVERY:
                settled = sizes[_WARM // _MEMORY_EVERY :]
                fifth = len(settled) // 5
                found.append((sum(settled[:fifth]) / fifth, sum(settled[-fifth:]) / fifth))
        return found

    @property
    def grows(self) -> bool:
        return any(last > first * (1 + _GROWTH) for first, last in self.settled_memory())


def run(zoo: Zoo, folder: Path, seeds: Sequence[int], num_processes: int, minutes: float = math.inf) -> bool:
    """Play the schedules of `seeds` in order, for at most `minutes`; models are in `folder`.

    Returns False if something differed or memory grows.
    """
    report, console, started = Report(), Console(), time.monotonic()
    reported, until = started, started + 60 * minutes
    _say(console, f"schedules of the seeds {seeds[0]}..{seeds[-1]}")
    with _progress(console) as progress:
        task = progress.add_task("schedules", total=len(seeds))
        for played in _played(zoo, folder, _until(until, seeds), len(seeds), num_processes):
            report.add(played)
            progress.advance(task)
            if played.failure:
                _say(console, played.failure)
            if not console.is_terminal and time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                _say(console, f"{reported - started:.0f} s: {report.tally}")
            if len(report.failures) == MAX_FAILURES:
                break
    end = f"{len(report.failures)} failed" if report.failures else "none failed"
    seconds, num_played = time.monotonic() - started, report.tally.schedules + len(report.failures)
    _say(console, f"{end} of {num_played} seeds from {seeds[0]} on, in {seconds:.0f} s: {report.tally}")
    for first, last in report.settled_memory():
        _say(console, f"memory {first:.0f} MB, in the end {last:.0f} MB")
    if report.grows:
        _say(console, f"memory grows by more than {_GROWTH:.0%}")
    return not report.failures and not report.grows


def play_seed(seed: int, zoo: Zoo) -> Played:
    try:
        return Played(seed, os.getpid(), play(schedule_of(seed, zoo.shapes), zoo))
    except MixedFailed as failed:
        return Played(seed, os.getpid(), None, str(failed))


def _resident_mb() -> float:
    """Return the memory that this process keeps, in MB, after the garbage of engines was collected."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _until(until: float, seeds: Iterable[int]) -> Iterator[int]:
    for seed in seeds:
        if time.monotonic() > until:
            return
        yield seed


def _played(zoo: Zoo, folder: Path, seeds: Iterator[int], count: int, num_processes: int) -> Iterator[Played]:
    """Play the seeds, at most `count`, and yield each result."""
    builds_all = count >= _MANY * num_processes
    if num_processes == 1:
        yield from _play_all(zoo, seeds, builds_all)
        return
    zoo.write_all()
    context = multiprocessing.get_context("spawn")
    waiting: multiprocessing.Queue[int | None] = context.Queue()
    results: multiprocessing.Queue[Played] = context.Queue()
    arguments = folder, waiting, results, builds_all
    processes = [context.Process(target=_play_apart, args=arguments, daemon=True) for _ in range(num_processes)]
    for process in processes:
        process.start()
    try:
        num_sent = 0
        for seed in islice(seeds, 2 * num_processes):
            waiting.put(seed)
            num_sent += 1
        while num_sent:
            yield _next_of(results, processes)
            num_sent -= 1
            for seed in islice(seeds, 1):
                waiting.put(seed)
                num_sent += 1
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


def _play_apart(
    folder: Path,
    waiting: multiprocessing.Queue[int | None],
    results: multiprocessing.Queue[Played],
    builds_all: bool,
) -> None:
    """Play in a process of its own, until it is ended."""
    torch.set_num_threads(1)
    for played in _play_all(Zoo(folder), iter(waiting.get, None), builds_all):
        results.put(played)


def _play_all(zoo: Zoo, seeds: Iterable[int], builds_all: bool) -> Iterator[Played]:
    if builds_all:
        zoo.build_all()
    for number, seed in enumerate(seeds, 1):
        played = play_seed(seed, zoo)
        if number % _MEMORY_EVERY == 0:
            played.memory = _resident_mb()
        yield played


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

"""The run of one shape: start every system, check that they compute the same model, and measure them in turns.

All systems stay up through the whole run; those not being measured are stopped, with all processes and threads.
In each round each cell is measured on each system, in random order and on the same new prompts.  A short request that
does not count comes right before each measurement.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.floor import Machine, measure_machine
from benchmarks.peers.agreement import TOP, Agreement, compare
from benchmarks.peers.environments import ENVIRONMENTS, FOLDER, InstallError
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.peers.rates import Cell
from benchmarks.peers.systems import OURS, command, system, variables
from benchmarks.shapes import SHAPES, checkpoint

LOAD_TIMEOUT_S = 900.0
REQUEST_TIMEOUT_S = 1800.0
TUNE_NEW_TOKENS = 9
SHORT_PROMPT_TOKENS = 128
AGREEMENT_PROMPTS, AGREEMENT_PROMPT_TOKENS, AGREEMENT_NEW_TOKENS = 16, 32, 16


@dataclass
class ShapeRun:
    """The results of one shape's run.  Per round, `seconds` holds the times of the cell's requests, `machines` what the
    machine could do right before."""

    shape: str
    machines: dict[Cell, list[Machine]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[tuple[str, Cell], list[tuple[float, ...]]] = field(default_factory=lambda: defaultdict(list))
    about: dict[str, str] = field(default_factory=dict)
    choices: dict[tuple[str, Cell], str] = field(default_factory=dict)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def machine(self, cell: Cell) -> Machine:
        """Return the machine's rates as medians over the rounds, as speeds are."""
        return Machine(*map(statistics.median, zip(*map(astuple, self.machines[cell]), strict=True)))


def run_shape(
    shape: str,
    names: list[str],
    missing: dict[str, str],
    cells: list[Cell],
    rounds: int,
    threads: int,
    console: Console,
    before: Path | None = None,
) -> ShapeRun:
    """Measure all systems with one shape.

    `missing`: the reason of each system that cannot take part.  A system that fails on the way joins them, loudly.
    """
    run = ShapeRun(shape, missing=dict(missing))
    prompts = _Prompts(SHAPES[shape].vocab_size)
    with Fleet(run, console) as fleet, Progress(console=console) as progress:
        todo = [name for name in names if name not in missing]
        task = progress.add_task(f"shape {shape}: loading", total=len(todo) * (1 + len(cells) * (1 + rounds)))
        for name in todo:
            progress.update(task, description=f"shape {shape}: loading {name}")
            fleet.start(name, shape, cells, threads, before)
            progress.advance(task)
        _check_agreement(fleet, run, prompts, console)
        for cell in cells:
            sample = prompts.of(cell)
            for name in list(fleet.workers):
                progress.update(task, description=f"shape {shape}: warming up {name}, {cell.name}")
                new = min(cell.new_tokens, TUNE_NEW_TOKENS)
                reply = fleet.ask(name, {"op": "tune", "prompts": sample, "max_new_tokens": new})
                run.choices[name, cell] = reply["choice"] if reply else ""
                progress.advance(task)
        for turn in range(rounds):
            for cell in cells:
                run.machines[cell].append(measure_machine())
                requests = [{"op": "generate", "prompts": prompts.of(cell), "max_new_tokens": n} for n in cell.counts]
                for name in prompts.shuffled(list(fleet.workers)):
                    progress.update(task, description=f"shape {shape}: round {turn + 1}/{rounds}, {cell.name}, {name}")
                    replies = fleet.ask_awake(name, prompts.random(1, SHORT_PROMPT_TOKENS), requests)
                    if None not in replies:
                        run.seconds[name, cell].append(tuple(reply["seconds"] for reply in replies if reply))
                    progress.advance(task)
        progress.update(task, description=f"shape {shape}: done", completed=progress.tasks[0].total)
    return run


class _Prompts:
    """New random prompts for every request, so that no cache of prefixes can help."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def random(self, count: int, length: int) -> list[list[int]]:
        return [[self._rng.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]

    def of(self, cell: Cell) -> list[list[int]]:
        return self.random(cell.batch, cell.prompt_tokens)

    def shuffled(self, names: list[str]) -> list[str]:
        return self._rng.sample(names, len(names))


class Fleet:
    """The workers by name.  One runs at a time; all have ended when the block ends, however it ends."""

    def __init__(self, run: ShapeRun, console: Console) -> None:
        self.workers: dict[str, Worker] = {}
        self._run = run
        self._console = console
        self._temporary = tempfile.TemporaryDirectory(prefix="bench-peers-")

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self.workers.values():
            worker.close() if kind is None else worker.kill()
        self._temporary.cleanup()

    @property
    def temporary(self) -> Path:
        """The folder of the workers' temporary files."""
        return Path(self._temporary.name)

    def start(self, name: str, shape: str, cells: list[Cell], threads: int, before: Path | None = None) -> None:
        """Load a system and leave it stopped.  A failure is printed and recorded."""
        folder = ENVIRONMENTS[name].folder if name in ENVIRONMENTS else FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{name.replace(' ', '-')}-{shape}.log"
        try:
            spec = system(name, shape, checkpoint(shape), threads, cells, before)
            temporary = Path(tempfile.mkdtemp(dir=self.temporary))
            worker = Worker(
                command(spec, json.dumps(spec.settings)), spec.folder, variables(spec, threads, temporary), log
            )
        except (InstallError, OSError) as error:
            self._lose(name, str(error))
            return
        self.workers[name] = worker
        with self._losing(name):
            self._run.about[name] = worker.receive(LOAD_TIMEOUT_S)["about"]
            worker.freeze()

    def ask(self, name: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Let one system run; return its answer.  If it fails, that is printed and recorded, and the answer is None."""
        return self._ask(name, [request])[0]

    def ask_awake(
        self, name: str, prompts: list[list[int]], requests: list[dict[str, Any]]
    ) -> list[dict[str, Any] | None]:
        """Let one system run and answer `requests` in a row, after a request of `prompts` that does not count.

        A system that was stopped while others ran has nothing left in the caches, and all its timers are due.
        """
        return self._ask(name, [{"op": "generate", "prompts": prompts, "max_new_tokens": 1}, *requests])[1:]

    def _ask(self, name: str, requests: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        if name in self.workers:
            worker = self.workers[name]
            with self._losing(name):
                worker.thaw()
                replies: list[dict[str, Any] | None] = [worker.ask(each, REQUEST_TIMEOUT_S) for each in requests]
                worker.freeze()
                return replies
        return [None] * len(requests)

    def drop(self, name: str, reason: str) -> None:
        self.workers.pop(name).kill()
        self._lose(name, reason)

    @contextmanager
    def _losing(self, name: str) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            self.drop(name, str(error))

    def _lose(self, name: str, reason: str) -> None:
        self._run.missing[name] = reason
        self._console.print(f"[bold red]{name} is left out of shape {self._run.shape}:[/] {reason}")


def _check_agreement(fleet: Fleet, run: ShapeRun, prompts: _Prompts, console: Console) -> None:
    """Compare every system with ours, and drop the ones that compute something else."""
    sample = prompts.random(AGREEMENT_PROMPTS, AGREEMENT_PROMPT_TOKENS)
    answers: dict[str, tuple[Any, Any]] = {}
    for name in list(fleet.workers):
        tops = fleet.ask(name, {"op": "top_logprobs", "prompts": sample, "count": TOP})
        tokens = fleet.ask(name, {"op": "generate", "prompts": sample, "max_new_tokens": AGREEMENT_NEW_TOKENS})
        if tops and tokens:
            answers[name] = tops["top"], tokens["tokens"]
    if OURS not in answers:
        console.print("[bold red]nothing to compare the peers' weights with[/]")
        return
    for name, (tops, tokens) in answers.items():
        run.agreements[name] = agreement = compare(tops, tokens, *answers[OURS])
        if not agreement.same_model:
            fleet.drop(
                name, f"does not compute the same model: {100 * agreement.overlap:.0f} % of the top {TOP} shared"
            )

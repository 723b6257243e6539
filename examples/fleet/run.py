"""`make example-fleet`: the whole run, its checks, and the exit status.

checkpoint -> Ray, router, engines -> samples and releases; one engine is killed -> end -> every sample checked
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from examples.demo.checks import Row
from examples.demo.display import results_table
from examples.demo.flags import SIZES
from examples.demo.run import signals_interrupt
from examples.fleet import check
from examples.fleet.display import View, engines_table, events_table, runs_of
from examples.fleet.errors import FleetError
from examples.fleet.events import Event, EventLog, write_events
from examples.fleet.sample import Sample
from examples.make_checkpoint.run import make_checkpoint
from rollout.core.errors import LockstepError

NEEDED = {"ray": "ray", "vllm_router": "vllm-router"}
TEXTS = (
    "Once upon a time", "The first of them went", "What is 2 + 3?", "A list of rivers:", "In the beginning",
    "def main():", "Dear reader,", "It was late when",
)  # fmt: skip
GROUP = 16
INTERRUPTED = 130
PLAIN_WIDTH = 118
TICK_S = 0.2
MORE_S = 120.0
"""Seconds after the time of the run in which the replacement may still come and take part in a release."""
ENGINE = {
    "weight_version": "0",
    "num_threads": 1,
    "enable_return_routed_experts": True,
    "max_total_tokens": 1 << 15,
    # A sample that a release interrupts goes on with KV of the new weights, so that each span can be scored by itself.
    "max_kv_version_lag": 0,
}


@dataclass(frozen=True)
class Record:
    """A run that is over."""

    asked: list[int]
    sent_again: int
    samples: list[Sample]
    committed: list[int]
    events: list[Event]
    statuses: list[int]


def main(argv: Sequence[str]) -> int:
    """Run the example and return 0 if every check held, 1 if one failed or something broke, 130 if interrupted."""
    args = _parse(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    started = time.monotonic()
    try:
        _require_packages()
        with signals_interrupt(), _work_folder(args.workdir) as folder:
            rows, record = _run(args, folder, console)
    except KeyboardInterrupt:
        console.print("interrupted; every process has been stopped", markup=False)
        return INTERRUPTED
    except LockstepError as error:
        console.print(f"fleet: error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print(engines_table(record.samples))
    console.print(events_table(record.events))
    counts = [replace(row, value=row.value.partition(": ")[0]) for row in rows]
    console.print(results_table(counts, title="A fleet of engines, one of them killed and replaced"))
    failed = [row for row in rows if row.ok is False]
    for row in failed:
        console.print(f"{row.name}: {row.value}", markup=False, highlight=False, soft_wrap=True)
    verdict = f"{len(failed)} checks FAILED" if failed else "all checks ok"
    console.print(f"{verdict}, {time.monotonic() - started:.0f} s in all; events: {args.events}", highlight=False)
    return 1 if failed else 0


def _run(args: argparse.Namespace, folder: Path, console: Console) -> tuple[list[Row], Record]:
    transformers_logging.disable_progress_bar()
    checkpoint, published = folder / "checkpoint", folder / "published"
    make_checkpoint(checkpoint, SIZES["tiny"])
    with View(console) as view:
        with _ray(args.engines, view):
            record = _unwrapped(lambda: asyncio.run(_serve(args, checkpoint, published, folder, view)))
        with signals_interrupt():  # anew: Ray has set handlers of its own
            rows = _rows(record, checkpoint, published, folder, view)
    facts = {"asked": len(record.asked), "answered": len(record.samples), "sent_again": record.sent_again}
    checks = {row.name: {"value": row.value, "ok": row.ok} for row in rows}
    write_events(args.events, record.events, {**facts, "committed": record.committed, "checks": checks})
    return rows, record


async def _serve(args: argparse.Namespace, checkpoint: Path, published: Path, folder: Path, view: View) -> Record:
    """Run the fleet and return its record.  Signals cancel the run, so that everything is left in order."""
    from examples.fleet.fleet import Fleet  # needs Ray
    from examples.fleet.rollouts import Rollouts
    from examples.fleet.router import Router
    from examples.fleet.trainer import Trainer, route_layout

    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    view.phase("start engines")
    events = EventLog(view.happened)
    trainer = Trainer(checkpoint, published)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    waiting: dict[tuple[int, ...], list[Sample]] = defaultdict(list)  # samples of a prompt, to learn from

    def answered(sample: Sample) -> None:
        view.answered(sample)
        fleet.answered(sample)
        waiting[sample.prompt.token_ids].append(sample)

    async def release() -> None:
        while True:
            await asyncio.sleep(args.release_every)
            group = max(waiting.values(), key=len, default=[])[-GROUP:]
            if len(group) > 1:
                waiting.clear()
                await fleet.release(group)

    settings = {**ENGINE, "model_path": str(checkpoint)}
    async with Router(folder) as router, Fleet(router, trainer, events, folder, settings) as fleet:
        texts = [tokenizer.encode(text) for text in TEXTS]
        rollouts = Rollouts(router.url, texts, route_layout(checkpoint), lambda: fleet.version, answered)
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(fleet.keep()) for _ in range(args.engines)]
            while len(fleet.serving) < args.engines:
                await asyncio.sleep(TICK_S)
            asking = tasks.create_task(rollouts.run(args.in_flight))
            releasing = tasks.create_task(release())
            await _play(args, fleet, router, rollouts, view)
            releasing.cancel()
            rollouts.stop()
            await asking
            for task in keeping:
                task.cancel()
        statuses = await fleet.stop()
    return Record(rollouts.asked, rollouts.sent_again, rollouts.samples, fleet.committed, list(events.events), statuses)


async def _play(args: argparse.Namespace, fleet: Any, router: Any, rollouts: Any, view: View) -> None:
    """Let it run, kill an engine in the middle, and see its replacement take part.  Raises `FleetError`."""
    start, killed = time.monotonic(), False
    while (seconds := time.monotonic() - start) < args.seconds or not fleet.is_replaced:
        router.require_running()
        if not killed and seconds > args.seconds / 2:
            fleet.kill()
            killed = True
        if seconds > args.seconds + MORE_S:
            raise FleetError(f"the engine that was killed was not replaced within {MORE_S:g} s")
        said = f"{len(rollouts.samples)} samples, {rollouts.sent_again} sent again, version {fleet.version}"
        view.phase("serve and train", seconds, args.seconds, said)
        await asyncio.sleep(TICK_S)


def _rows(record: Record, checkpoint: Path, published: Path, folder: Path, view: View) -> list[Row]:
    """Score the samples again, and return a row for every check of the run."""
    from examples.fleet.reference import score_again

    def progress(done: int, total: int) -> None:
        view.phase("score every sample again", done, total)

    progress(0, len(record.committed))
    samples = record.samples
    scored = check.rescore(
        score_again(samples, record.committed, checkpoint, published, folder / "reference", progress)
    )
    return rows_of(record, scored)


def rows_of(record: Record, scored: check.Rescoring) -> list[Row]:
    """Return the facts of a run, with their bounds."""
    samples = record.samples
    spans = sum(len(sample.spans) for sample in samples)
    lost = check.lost(record.asked, samples)
    malformed = [line for sample in samples for line in check.malformed(sample)]
    outdated = [line for sample in samples for line in check.outdated(sample, record.committed)]
    unreplaced = check.unreplaced(record.events, samples)
    distinct = scored.distinct / max(scored.comparable, 1)

    def row(name: str, value: object, bound: str = "", ok: bool | None = None) -> Row:
        return Row("The run", name, str(value), bound, ok)

    def none(name: str, problems: Sequence[str]) -> Row:
        value = f"{len(problems)}: {problems[0]}" if problems else "0"
        return row(name, value, "0", not problems)

    return [
        row("samples asked, answered", f"{len(record.asked)}, {len(samples)}"),
        row("sent again, as their engine had died", record.sent_again, "> 0", record.sent_again > 0),
        none("lost, or answered twice", lost),
        none("tokens, log-probabilities, experts or spans that do not fit", malformed),
        none("of a version that was not in force", outdated),
        row("samples that span versions", sum(len(sample.spans) > 1 for sample in samples)),
        row("spans scored again", f"{scored.spans} of {spans}", "all", scored.spans == spans > 0),
        none("mixed: other bits than their version gives", scored.mixed),
        row("tokens that differ from the previous version", f"{distinct:.1%}", "> 90%", distinct > 0.9),
        row("versions committed", runs_of(record.committed), "> 2", len(record.committed) > 2),
        none("wrong with the replacement", unreplaced),
        row("exit statuses at the end", record.statuses, "0", not any(record.statuses)),
    ]


# --- surroundings ------------------------------------------------------------------------------------------------


def _require_packages() -> None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise FleetError(f"{' and '.join(missing)} not installed here: run `make example-fleet`")


@contextmanager
def _ray(engines: int, view: View) -> Iterator[None]:
    """Start Ray on this machine for this run alone, with a CPU for each engine; shut it down at the end."""
    import ray

    view.phase("start Ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    temp = tempfile.mkdtemp(prefix="fleet-ray-")  # short: it holds sockets
    try:
        ray.init(
            address="local", num_cpus=engines, include_dashboard=False, log_to_driver=False, logging_level="error",
            _temp_dir=temp,
        )  # fmt: skip
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def _unwrapped(run: Any) -> Any:
    """Return `run()`; raise the first error of a group of tasks, and `KeyboardInterrupt` for a cancelled run."""
    try:
        return run()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@contextmanager
def _work_folder(given: Path | None) -> Iterator[Path]:
    """Yield `--workdir`, which must be new or empty, or a temporary folder that is removed at the end."""
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise FleetError(f"--workdir {given} is not an empty folder")
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-fleet-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.fleet.run", description="Engines behind a stock router; one is killed and replaced."
    )
    add = parser.add_argument
    add(
        "--seconds",
        type=_number(6, 3600),
        default=60,
        help="length of the run; an engine is killed after half of it (default: 60)",
    )
    add("--engines", type=_whole(2, 8), default=2, help="engines, a thread each (2)")
    add("--in-flight", type=_whole(8, 256), default=32, help="samples in flight (default: 32)")
    add("--release-every", type=_number(0.5, 600), default=4, help="seconds between two releases of weights (4)")
    add("--events", type=Path, default=Path("events.json"), help="file for events and checks (events.json)")
    add("--workdir", type=Path, help="folder for checkpoint, weights and logs, kept (default: a temporary one)")
    args = parser.parse_args(argv)
    if args.release_every > args.seconds / 3:
        parser.error("--release-every must be at most a third of --seconds")
    if not args.events.absolute().parent.is_dir():
        parser.error(f"--events: there is no folder {args.events.absolute().parent}")
    return args


def _number(least: float, most: float) -> Any:
    """Return a parser of numbers in least..most."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be in {least:g}..{most:g}")
        return value

    parse.__name__ = "number"
    return parse


def _whole(least: int, most: int) -> Any:
    """Return a parser of whole numbers in least..most."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be in {least}..{most}")
        return value

    parse.__name__ = "whole number"
    return parse


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

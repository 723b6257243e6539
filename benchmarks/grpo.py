"""Tokens a second of a load as GRPO makes it: many samples of each of many prompts, at once, their lengths uneven.

If another checkout of this project is given, it is measured, too.  Each checkout has a process of its own.  They take
turns with the same prompts and lengths, and one is stopped while the other runs.  Steps are exact; seconds compare only
within one run.

    git worktree add build/before COMMIT && python -m benchmarks.run --only grpo --against build/before
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.peers.process import Worker
from benchmarks.shapes import SHAPES, checkpoint

PROMPTS = {"S": 32, "M": 4}  # M takes minutes for this many
SAMPLES = 16
PROMPT_TOKENS = 256
ANSWER_TOKENS = (128, 512)
MAX_RUNNING = 256  # the default of --max-running-requests
START_S = 600.0
ROUND_S = 3600.0
HERE = Path(__file__).resolve().parents[1]


def run(
    shape: str, rounds: int, console: Console, against: Path | None = None, prompts: int | None = None
) -> list[dict]:
    """Measure the checkouts, print one table, and return its rows, one for each checkout."""
    prompts = PROMPTS[shape] if prompts is None else prompts
    trees = {"this": HERE} if against is None else {"before": against.resolve(), "this": HERE}
    running = min(MAX_RUNNING, prompts * SAMPLES)
    settings = {
        "model_path": str(checkpoint(shape)),
        "max_total_tokens": running * ANSWER_TOKENS[1] + prompts * PROMPT_TOKENS,
        "max_running_requests": running,
        "num_threads": torch.get_num_threads(),
    }
    request = {
        "vocab_size": SHAPES[shape].vocab_size,
        "prompts": prompts,
        "samples": SAMPLES,
        "prompt_tokens": PROMPT_TOKENS,
        "answers": ANSWER_TOKENS,
    }
    replies: dict[str, list[dict]] = {name: [] for name in trees}
    with ExitStack() as stack, Progress(console=console) as progress:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-grpo-")))
        task = progress.add_task(f"GRPO, shape {shape}", total=rounds * len(trees))
        workers = {}
        for name, tree in trees.items():
            # -P: the folder of the script, which is not the checkout to measure, is no place to import from
            command = [sys.executable, "-P", str(Path(__file__).with_name("grpo_worker.py")), json.dumps(settings)]
            workers[name] = Worker(command, scratch, {"PYTHONPATH": str(tree)}, scratch / f"{name}.log")
            stack.callback(workers[name].close)
            workers[name].receive(START_S)
            workers[name].ask(request | {"seed": 0, "prompts": 1, "samples": 2}, ROUND_S)  # warms up
            workers[name].freeze()
        for turn in range(rounds):
            for name in list(trees)[:: 1 if turn % 2 else -1]:
                workers[name].thaw()
                replies[name].append(workers[name].ask(request | {"seed": turn + 1}, ROUND_S))
                workers[name].freeze()
                progress.advance(task)
    rows = [_row(shape, name, prompts, replies[name]) for name in trees]
    _print(rows, console)
    return rows


def _row(shape: str, name: str, prompts: int, replies: list[dict]) -> dict:
    rates = [reply["tokens"] / reply["seconds"] for reply in replies]
    steps = [reply["steps"] for reply in replies]
    return {
        "shape": shape,
        "checkout": name,
        "prompts": prompts,
        "tokens a second": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "steps": statistics.median(steps),
        "tokens a step": statistics.median([reply["tokens"] / reply["steps"] for reply in replies]),
        "rounds": len(replies),
    }


def _print(rows: list[dict], console: Console) -> None:
    first = rows[0]
    table = Table(
        title=f"GRPO, shape {first['shape']}: {first['prompts']} prompts of {PROMPT_TOKENS} x {SAMPLES} samples of "
        f"{ANSWER_TOKENS[0]} to {ANSWER_TOKENS[1]}, bf16, log-probabilities, medians of {first['rounds']}"
    )
    for column in ("checkout", "tokens/s", "range", "steps", "tokens a step", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["checkout"],
            f"{row['tokens a second']:.0f}",
            f"{row['slowest']:.0f} .. {row['fastest']:.0f}",
            f"{row['steps']:.0f}",
            f"{row['tokens a step']:.1f}",
            f"{row['tokens a second'] / first['tokens a second']:.2f}x",
        )
    console.print(table)

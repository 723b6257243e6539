"""Measures decoding with adapters: requests of one batch have none, or share 1, 8 or 32 adapters; all cases in turns.

A case gains or loses by the one before it, whose memory is still in the caches.  So the order of the cases changes from
round to round (`case_order`).

no slots     an engine without --enable-lora
none         an engine with 32 adapters of rank 16 of attention in its slots; no request names one
N adapters   the same engine; request i has adapter i modulo N

B of every adapter is zero: the products are computed, and the model draws the same tokens.  An adapter that changes
tokens changes the experts that a step reads, too.  Tokens are drawn at temperature 1, as greedy requests of a random
model soon repeat one token.

A number is the median over all steps that decode the whole batch: of the time from one to the next, and of the CPU time
of the process.  Others on the machine disturb single steps, and whole generations more.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.adapter_refresh import RANK, TARGETS, random_adapter
from benchmarks.shapes import SHAPES, checkpoint
from benchmarks.throughput import PROMPT_TOKENS
from rollout.core.forward_batch import ForwardBatch
from rollout.server.engine import Engine
from weight_sync.safetensors_file import read_header

BATCH = 64
COUNTS = (1, 8, 32)


def run(shape: str, rounds: int, new_tokens: int, console: Console) -> list[dict]:
    """Measure all cases in turns, print a table, and return its rows."""
    folder, vocabulary = checkpoint(shape), SHAPES[shape].vocab_size
    with tempfile.TemporaryDirectory(prefix="lockstep-adapters-") as scratch:
        paths = _write_adapters(folder, Path(scratch))
        plain = _engine(folder)
        adapted = _engine(
            folder,
            enable_lora=True,
            max_loras_per_batch=max(COUNTS),
            lora_paths=",".join(f"{path.name}={path}" for path in paths),
        )
    cases: dict[str, tuple[Engine, list[str | None] | None]] = {"no slots": (plain, None), "none": (adapted, None)}
    for count in COUNTS:
        names: list[str | None] = [paths[number % count].name for number in range(BATCH)]
        cases[f"{count} adapter{'s' if count > 1 else ''}"] = adapted, names
    seconds: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console) as progress:
        task = progress.add_task(f"adapters, {shape}", total=(rounds + 1) * len(cases))
        for turn in range(rounds + 1):  # turn 0 warms up
            for name in case_order(list(cases), turn):
                engine, adapters = cases[name]
                prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH)]
                with _timed_steps(engine) as steps:
                    _generate(engine, prompts, adapters, new_tokens)
                if turn:
                    seconds[name] += [after - before for (before, _), (after, _) in pairwise(steps)]
                    cpu[name] += [after - before for (_, before), (_, after) in pairwise(steps)]
                progress.advance(task)
    for engine in (plain, adapted):
        engine.close()
    rows: list[dict] = []
    for name in cases:
        step_s, cpu_s = statistics.median(seconds[name]), statistics.median(cpu[name])
        row = {"part": "adapters", "shape": shape, "case": name, "decode": BATCH / step_s, "cpu_ms": 1e3 * cpu_s}
        first = rows[0] if rows else row
        rows.append(row | {"ratio": row["decode"] / first["decode"], "cpu_ratio": first["cpu_ms"] / row["cpu_ms"]})
    _print(shape, rows, console)
    return rows


@contextmanager
def _timed_steps(engine: Engine) -> Iterator[list[tuple[float, float]]]:
    """Give the list of the times at which steps begin that decode the whole batch: clock and CPU of the process."""
    found: list[tuple[float, float]] = []
    runner = engine.scheduler.runner
    forward = runner.forward

    def timed(batch: ForwardBatch) -> Any:
        if len(batch.decode.seq_lens) == batch.num_tokens == BATCH:
            found.append((time.perf_counter(), time.process_time()))
        return forward(batch)

    runner.forward = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del runner.forward


def case_order(names: list[str], turn: int) -> list[str]:
    """Return the order of cases in this round: a Latin square in which each follows each of the others as often.

    Williams (1949).  Each case has each place once in as many rounds as there are cases.  Each follows each other case
    equally often in these rounds if the number of cases is even, and in twice as many if it is odd.
    """
    count = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [names[(step + turn) % count] for step in zigzag]
    return order[::-1] if count % 2 and turn // count % 2 else order


def _engine(folder: Path, **settings: object) -> Engine:
    return Engine(
        model_path=str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=32768, **settings
    )


def _generate(engine: Engine, prompts: list[list[int]], adapters: list[str | None] | None, new_tokens: int) -> None:
    params = {"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    request = {"input_ids": prompts, "sampling_params": params}
    engine.generate(**request if adapters is None else request | {"lora_path": adapters})


def _write_adapters(folder: Path, scratch: Path) -> list[Path]:
    """Write 32 adapters of the model's attention that change no token; return their folders."""
    metas = [tensor.meta for file in sorted(folder.glob("*.safetensors")) for tensor in read_header(file).tensors]
    shapes = {meta.name: meta.shape for meta in metas}
    paths = []
    for number in range(max(COUNTS)):
        paths.append(scratch / f"adapter{number}")
        paths[-1].mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(TARGETS)}
        (paths[-1] / "adapter_config.json").write_text(json.dumps(config))
        tensors = random_adapter(shapes)
        for name in tensors:
            if "lora_B" in name:
                tensors[name].zero_()
        save_file(tensors, paths[-1] / "adapter_model.safetensors")
    return paths


def _print(shape: str, rows: list[dict], console: Console) -> None:
    table = Table(title=f"{shape}: tokens a second of {BATCH} requests, adapters of rank {RANK} of attention")
    for column in ("requests have", "decode", "of no slots", "CPU ms a step", "by CPU time"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = f"{row['decode']:.0f}", f"{row['ratio']:.3f}", f"{row['cpu_ms']:.1f}", f"{row['cpu_ratio']:.3f}"
        table.add_row(row["case"], *numbers)
    console.print(table)
    console.print(f"{torch.get_num_threads()} threads")

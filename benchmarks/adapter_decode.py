"""Measures decoding with adapters: requests of one batch have none, or share 1, 8 or 32 adapters; all cases in turns.

A case gains or loses by the one before it, whose memory is still in the caches.  So the order of the cases changes from
round to round (`case_order`).

no slots     an engine without --enable-lora
none         an engine with 32 adapters of rank 16 of attention in its slots; no request names one
N adapters   the same engine; request i has adapter i modulo N

B of every adapter is zero: the products are computed, and the model draws the same tokens.  An adapter that changes
tokens changes the experts that a step reads, too.  Tokens are drawn at temperature 1, as greedy requests of a random
model soon repeat one token.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.adapter_refresh import RANK, TARGETS, random_adapter
from benchmarks.shapes import SHAPES, checkpoint
from benchmarks.throughput import PROMPT_TOKENS
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
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console) as progress:
        task = progress.add_task(f"adapters, {shape}", total=(rounds + 1) * len(cases) * 2)
        for turn in range(rounds + 1):  # turn 0 warms up
            for name in case_order(list(cases), turn):
                engine, adapters = cases[name]
                for new in (1, new_tokens):
                    prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH)]
                    start = time.perf_counter()
                    _generate(engine, prompts, adapters, new)
                    if turn:
                        times[name, new].append(time.perf_counter() - start)
                    progress.advance(task)
    for engine in (plain, adapted):
        engine.close()
    rows = []
    for name in cases:
        whole, first = (statistics.median(times[name, new]) for new in (new_tokens, 1))
        decode = BATCH * (new_tokens - 1) / (whole - first)
        row = {
            "part": "adapters",
            "shape": shape,
            "case": name,
            "decode": decode,
            "prompts": BATCH * PROMPT_TOKENS / first,
        }
        rows.append(row | {"ratio": decode / (rows[0]["decode"] if rows else decode)})
    _print(shape, rows, console)
    return rows


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
    for column in ("requests have", "decode", "of no slots", "prompts"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["case"], f"{row['decode']:.0f}", f"{row['ratio']:.3f}", f"{row['prompts']:.0f}")
    console.print(table)
    console.print(f"{torch.get_num_threads()} threads")

"""Tokens a second of `Engine` and of `transformers.generate`: same weights, bf16, greedy, one interleaved run.

Each round times, for every batch size, ours and theirs one after the other; the table shows medians over rounds.
"Decode" leaves the prompt out: the time of a run with N new tokens less that of a run with one.  A second table shows
what a step that only decodes costs outside the operators, measured as in `python_per_step`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks import python_per_step
from benchmarks.floor import decode_step_floor_s, measure_machine
from benchmarks.shapes import SHAPES, checkpoint
from rollout.scheduler.stats import PHASES
from rollout.server.engine import Engine

PROMPT_TOKENS = 128
Generate = Callable[[list[list[int]], int], None]


def run(shape: str, batches: list[int], rounds: int, new_tokens: int, console: Console) -> list[dict]:
    """Measure both systems in turns, print two tables, and return the rows of the first one."""
    spec, folder = SHAPES[shape], checkpoint(shape)
    machine = measure_machine()
    engine = Engine(model_path=str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=65536)
    transformers_logging.disable_progress_bar()
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
    systems: dict[str, Generate] = {
        "lockstep": by_engine(engine),
        "transformers": by_transformers(hf),
    }
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console) as progress:
        task = progress.add_task(f"shape {shape}", total=(rounds + 1) * len(batches) * len(systems) * 2)
        for turn in range(rounds + 1):  # turn 0 warms up
            for batch in batches:
                for name, generate in systems.items():
                    for new in (1, new_tokens):
                        prompts = [[rng.randrange(spec.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
                        start = time.perf_counter()
                        generate(prompts, new)
                        if turn:
                            times[name, batch, new].append(time.perf_counter() - start)
                        progress.advance(task)
    rows = []
    for batch in batches:
        median = {key: statistics.median(times[key]) for key in times if key[1] == batch}
        row = {"shape": shape, "batch": batch}
        for name in systems:
            whole, first = median[name, batch, new_tokens], median[name, batch, 1]
            row[name] = batch * new_tokens / whole
            row[f"{name} decode"] = batch * (new_tokens - 1) / max(whole - first, 1e-9)
        row["ratio"] = row["lockstep"] / row["transformers"]
        row["decode ratio"] = row["lockstep decode"] / row["transformers decode"]
        floor = decode_step_floor_s(spec, batch, PROMPT_TOKENS + new_tokens // 2, machine)
        row["floor share"] = row["lockstep decode"] * floor / batch
        row["step"] = asdict(python_per_step.measure(engine, batch, PROMPT_TOKENS, spec.vocab_size))
        rows.append(row)
    engine.close()
    _print(rows, machine, new_tokens, rounds, console)
    return rows


def by_engine(engine: Engine) -> Generate:
    """Return greedy generation by our engine, of a given number of tokens."""

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        engine.generate(input_ids=prompts, sampling_params=params)

    return generate


def by_transformers(model: torch.nn.Module) -> Generate:
    """Return greedy generation by `transformers.generate`, of a given number of tokens."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    return generate


def _print(rows: list[dict], machine, new_tokens: int, rounds: int, console: Console) -> None:
    table = Table(
        title=f"Shape {rows[0]['shape']}: tokens/s, {PROMPT_TOKENS} in / {new_tokens} out, bf16, greedy, "
        f"medians of {rounds}"
    )
    for column in ("batch", "lockstep", "transformers", "ratio", "decode", "hf decode", "ratio", "share of floor"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            *(f"{row[name]:.0f}" for name in ("lockstep", "transformers")),
            f"{row['ratio']:.2f}x",
            *(f"{row[name]:.0f}" for name in ("lockstep decode", "transformers decode")),
            f"{row['decode ratio']:.2f}x",
            f"{100 * row['floor share']:.0f} %",
        )
    console.print(table)
    console.print(
        f"floor: {machine.read_bytes_per_s / 1e9:.1f} GB/s read, {machine.bf16_flops_per_s / 1e9:.0f} GFLOP/s bf16, "
        f"{torch.get_num_threads()} threads"
    )
    console.print(_step_table(rows))


def _step_table(rows: list[dict]) -> Table:
    table = Table(title="Microseconds of a step that only decodes, medians; Python is the step less its operators")
    for column in ("batch", *PHASES, "step", "operators", "calls", "Python", "bound"):
        table.add_column(column, justify="right")
    for row in rows:
        step = row["step"]
        bound = python_per_step.BASE_US + python_per_step.PER_REQUEST_US * step["batch"]
        values = [step["phases_us"][name] for name in PHASES]
        values += [step["turn_us"], step["operators_us"], step["calls"], step["python_us"], bound]
        table.add_row(str(row["batch"]), *(f"{value:.0f}" for value in values))
    return table

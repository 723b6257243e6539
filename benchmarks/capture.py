"""The cost of recording routes: one engine, its recorder taken out or put back, in one interleaved run.

One engine, because two copies of the same weights differ in speed by more than what is measured here.

off       no recording
off again the same once more: what the machine's noise makes of no difference
recorded  recording on, not returned: what every request pays
returned  recording on, every request takes its rows
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.shapes import SHAPES, checkpoint
from rollout.server.engine import Engine


def run(shape: str, batch: int, rounds: int, new_tokens: int, console: Console) -> list[dict]:
    """Measure the variants in turns, print one table, and return its rows."""
    spec, folder = SHAPES[shape], str(checkpoint(shape))
    engine = Engine(
        model_path=folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_total_tokens=65536,
        enable_return_routed_experts=True,
    )
    runner = engine.scheduler.runner
    store = runner.route_store
    off, on = (None, False), (store, False)
    variants = {"off": off, "off again": off, "recorded": on, "returned": (store, True)}
    times: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console) as progress:
        task = progress.add_task(f"capture, shape {shape}", total=(rounds + 1) * len(variants))
        for turn in range(rounds + 1):
            for name in rng.sample(list(variants), len(variants)):  # the order of the variants must not matter
                runner.route_store, returned = variants[name]
                prompts = [[rng.randrange(spec.vocab_size) for _ in range(128)] for _ in range(batch)]
                start = time.perf_counter()
                engine.generate(
                    input_ids=prompts,
                    sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
                    return_routed_experts=returned,
                    routed_experts_format="compact",
                )
                if turn:
                    times[name].append(time.perf_counter() - start)
                progress.advance(task)
    engine.close()
    rows = []
    for name in variants:
        median = statistics.median(times[name])
        rows.append(
            {
                "shape": shape,
                "batch": batch,
                "variant": name,
                "tokens_per_s": batch * new_tokens / median,
                "cost": median / statistics.median(times["off"]) - 1,
            }
        )
    table = Table(title=f"Recording routes, shape {shape}, batch {batch}, 128 in / {new_tokens} out, {rounds} rounds")
    for column in ("variant", "tokens/s", "cost"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["variant"], f"{row['tokens_per_s']:.0f}", f"{100 * row['cost']:+.1f} %")
    console.print(table)
    return rows

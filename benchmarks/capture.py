"""What recording routes costs: three engines on the same weights in one interleaved run.

off       no recording
recorded  recording on, nobody asks: what every request pays
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
from rollout.entrypoints.engine import Engine


def run(shape: str, batch: int, rounds: int, new_tokens: int, console: Console) -> list[dict]:
    """One table; returns its rows."""
    spec, folder = SHAPES[shape], str(checkpoint(shape))
    common = {"model_path": folder, "dtype": "bfloat16", "skip_tokenizer_init": True, "max_total_tokens": 65536}
    off = Engine(**common)
    on = Engine(**common, enable_return_routed_experts=True)
    variants = {"off": (off, False), "recorded": (on, False), "returned": (on, True)}
    times: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console) as progress:
        task = progress.add_task(f"capture, shape {shape}", total=(rounds + 1) * len(variants))
        for turn in range(rounds + 1):
            for name, (engine, returned) in variants.items():
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
    off.close()
    on.close()
    base = statistics.median(times["off"])
    rows = []
    for name in variants:
        # each round's ratio to the same round's "off": what the machine does meanwhile cancels
        ratios = [b / a for a, b in zip(times["off"], times[name])]
        median = statistics.median(times[name])
        rows.append(
            {
                "shape": shape,
                "batch": batch,
                "variant": name,
                "tokens_per_s": batch * new_tokens / median,
                "cost": statistics.median(ratios) - 1,
            }
        )
    table = Table(title=f"Recording routes, shape {shape}, batch {batch}, 128 in / {new_tokens} out, {rounds} rounds")
    for column in ("variant", "tokens/s", "cost"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["variant"], f"{row['tokens_per_s']:.0f}", f"{100 * row['cost']:+.1f} %")
    console.print(table)
    assert base > 0
    return rows

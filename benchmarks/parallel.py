"""Several ranks against one: throughput of the layouts, collectives counted, and what recording routes costs them.

    layouts   decode and prefill, all engines alive and taking turns in random order; the others wait for a message.
              In addition: how long a bare all-gather takes between the ranks of one of them
    counts    of one decode step and one prefill step, on every rank, next to the formula
    routes    with scattered tokens: not recorded, gathered once a forward, gathered once a layer

One machine: two ranks have the cores that one rank has, a thread each.  M has 4 layers here.
"""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.bar_chart import Bars, write_svg
from benchmarks.parallel_collectives import Engine
from benchmarks.parallel_ranks import BARE_BYTES, RankProcesses, Routes, StepTaken, Work
from benchmarks.parallel_steps import decode_rate, decode_seconds, differences, prefill_rate
from benchmarks.shapes import SHAPES, shallow_checkpoint
from rollout.families.registry import load_model_config

EP2 = {"tp_size": 2, "ep_size": 2}
SCATTERED = "tp 2, ep 2, all_to_all"
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "tp 2": {"tp_size": 2},
    "tp 2, ep 2": EP2,
    SCATTERED: EP2 | {"moe_a2a_backend": "all_to_all", "enable_return_routed_experts": True},
    "dp 2, ep 2, all_to_all": EP2 | {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "all_to_all"},
    "2 replicas": {"dp_size": 2},
}
ROUTES: dict[str, Routes] = {
    "off": "off",
    "off again": "off",
    "recorded": "recorded",
    "a gather per layer": "per_layer",
    "returned": "returned",
}
COLLECTIVES = {"broadcast": "bcast", "all_gather": "gather", "all_to_all": "a2a"}
LAYERS = 4
PROMPT_TOKENS = 128
CHUNK = 512
PREFILL_TOKENS = 2 * CHUNK  # of each of two prompts
DECODE_STEPS = 32
POOL_TOKENS = 20480
BATCHES = (8, 32)
BARE_GATHERS = 500
ROUTES_BATCH = 32
ROUTES_FACTOR = 2  # small differences take more rounds
MAX_COST = 0.05
BF16_BYTES = 2


def run(shape: str, rounds: int, console: Console, svg: Path | None) -> list[dict]:
    """Measure a shape, print three tables, draw a picture into `svg` if it is given, and return the tables' rows."""
    folder, vocab_size = shallow_checkpoint(shape, LAYERS), SHAPES[shape].vocab_size
    with ExitStack() as stack:
        engines = {}
        for name, settings in LAYOUTS.items():
            console.print(f"several ranks, shape {shape}: starting {name}")
            engines[name] = stack.enter_context(start(folder, **settings))
        layouts = measure_layouts(engines, vocab_size, rounds, console)
        bare_s = bare_gather_seconds(engines[SCATTERED])
        counts = [row for name, engine in engines.items() for row in count_collectives(name, engine, vocab_size)]
        routes = measure_routes(engines[SCATTERED], vocab_size, ROUTES_FACTOR * rounds, console)
    parts = {"layouts": layouts, "collectives": counts, "routes": routes, "bare": [{"all_gather_s": bare_s}]}
    rows = [{"shape": shape, "table": table} | row for table, part in parts.items() for row in part]
    console.print(_layout_table(shape, layouts, rounds))
    console.print(f"an all-gather of {BARE_BYTES} bytes between two ranks: {1e3 * bare_s:.2f} ms")
    console.print(_count_table(shape, counts), _route_table(shape, routes))
    for line in (line for row in counts for line in row["differences"]):
        console.print(f"[red]{line}[/red]")
    if svg is not None:
        write_svg(svg, [_bars(shape, layouts)])
        console.print(f"wrote {svg}")
    return rows


def start(folder: Path, **settings: Any) -> RankProcesses:
    fixed = {"dtype": "bfloat16", "max_total_tokens": POOL_TOKENS, "chunked_prefill_size": CHUNK}
    return RankProcesses(model_path=str(folder), skip_tokenizer_init=True, **fixed, **settings)


def prompts_of(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def decode_work(batch: int, vocab_size: int, **more: Any) -> Work:
    """Return work that decodes the same prompts every time: after the first time they are in the prefix cache."""
    return Work(prompts=prompts_of(batch, batch, PROMPT_TOKENS, vocab_size), new_tokens=DECODE_STEPS + 2, **more)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_layouts(engines: dict[str, RankProcesses], vocab_size: int, rounds: int, console: Console) -> list[dict]:
    """Measure all layouts in turns; return their tokens a second as medians over rounds."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    rng = random.Random(0)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("layouts", total=(rounds + 1) * len(engines))
        for turn in range(rounds + 1):  # turn 0 warms up
            for name in rng.sample(list(engines), len(engines)):
                engine = engines[name]
                found = {
                    f"decode {batch}": decode_rate(engine.layout, engine.run(decode_work(batch, vocab_size)), batch)
                    for batch in BATCHES
                }
                fresh = prompts_of(1000 + turn, 2, PREFILL_TOKENS, vocab_size)
                found["prefill"] = prefill_rate(engine.run(Work(prompts=fresh, new_tokens=1)), 2 * PREFILL_TOKENS)
                for key, rate in found.items() if turn else ():
                    rates[name, key].append(rate)
                progress.advance(task)
    first = next(iter(engines))
    columns = [f"decode {batch}" for batch in BATCHES] + ["prefill"]
    medians = {key: median(values) for key, values in rates.items()}
    return [
        {"layout": name, "tokens_per_s": {column: medians[name, column] for column in columns}}
        | {"against_one": {column: medians[name, column] / medians[first, column] for column in columns}}
        for name in engines
    ]


def bare_gather_seconds(processes: RankProcesses) -> float:
    """Return the median seconds of an all-gather on the rank that waits longer."""
    by_rank = processes.run(Work(prompts=[], new_tokens=0, bare_gathers=BARE_GATHERS))
    return max(median(step.seconds for step in steps) for steps in by_rank)


def count_collectives(name: str, processes: RankProcesses, vocab_size: int) -> list[dict]:
    """Return a row for a decode step and one for a step of prefill; no row for an engine of one rank."""
    if processes.layout.tp_size == 1:
        return []
    args = processes.args
    config = load_model_config(args.model_path)
    engine = Engine(processes.layout, config, args.moe_a2a_backend, BF16_BYTES)
    decodes = processes.run(decode_work(BATCHES[0], vocab_size, counts=True))
    prompts = prompts_of(999, 2, PREFILL_TOKENS, vocab_size)
    prefills = processes.run(Work(prompts=prompts, new_tokens=1, counts=True))
    # Not the first step: its turn brought the messages.
    return [
        {"layout": name, "step": f"decode {BATCHES[0]}"} | beside_formula(engine, [steps[3] for steps in decodes]),
        {"layout": name, "step": "prefill"} | beside_formula(engine, [steps[1] for steps in prefills]),
    ]


def beside_formula(engine: Engine, steps: list[StepTaken]) -> dict:
    """Compare one step on all ranks with the formula.

    `calls`: of one rank, by collective; `num_bytes`: of all ranks together.
    """
    calls: dict[str, int] = defaultdict(int)
    for key, (count, _) in steps[0].sent.items():
        calls[key.split()[1]] += count
    num_bytes = sum(num_bytes for step in steps for _, num_bytes in step.sent.values())
    return {
        "num_tokens": sum(step.num_tokens for step in steps) // engine.layout.attn_tp_size,
        "calls": dict(calls),
        "num_bytes": num_bytes,
        "differences": differences(engine, steps),
    }


def measure_routes(processes: RankProcesses, vocab_size: int, rounds: int, console: Console) -> list[dict]:
    """Measure the variants in random order.

    Return medians over all decode steps of all rounds, and over the rounds of a prefill.
    """
    decodes: dict[str, list[float]] = defaultdict(list)
    prefills: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(1)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("routes", total=(rounds + 1) * len(ROUTES))
        for turn in range(rounds + 1):
            for name in rng.sample(list(ROUTES), len(ROUTES)):
                routes = ROUTES[name]
                steps = processes.run(decode_work(ROUTES_BATCH, vocab_size, routes=routes))[0]
                fresh = prompts_of(rng.randrange(10**9), 2, PREFILL_TOKENS, vocab_size)
                prefill = processes.run(Work(prompts=fresh, new_tokens=1, routes=routes))[0]
                if turn:
                    decodes[name] += decode_seconds(steps, ROUTES_BATCH)
                    prefills[name].append(sum(step.seconds for step in prefill))
                progress.advance(task)
    base = {
        "decode": (median(decodes["off"]) + median(decodes["off again"])) / 2,
        "prefill": (median(prefills["off"]) + median(prefills["off again"])) / 2,
    }
    return [
        {
            "variant": name,
            "decode_step_s": median(decodes[name]),
            "prefill_s": median(prefills[name]),
            "decode_cost": median(decodes[name]) / base["decode"] - 1,
            "prefill_cost": median(prefills[name]) / base["prefill"] - 1,
        }
        for name in ROUTES
    ]


# --- showing ----------------------------------------------------------------------------------------------------------


def _layout_table(shape: str, rows: list[dict], rounds: int) -> Table:
    table = Table(
        title=f"Shape {shape}, several ranks on one machine: tokens/s and share of one rank's, bf16, {rounds} rounds"
    )
    table.add_column("layout")
    for column in rows[0]["tokens_per_s"]:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{rate:.0f} ({row['against_one'][column]:.2f}x)" for column, rate in row["tokens_per_s"].items()]
        table.add_row(row["layout"], *cells)
    return table


def _count_table(shape: str, rows: list[dict]) -> Table:
    table = Table(title=f"Shape {shape}: collectives of one step, calls of a rank, bytes that all ranks send")
    for column in ("layout", "step", *COLLECTIVES.values(), "kB", "formula"):
        left = column in ("layout", "step")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        calls = (str(row["calls"].get(name, 0)) for name in COLLECTIVES)
        verdict = "[red]other[/red]" if row["differences"] else "same"
        table.add_row(row["layout"], row["step"], *calls, f"{row['num_bytes'] / 1e3:.1f}", verdict)
    return table


def _route_table(shape: str, rows: list[dict]) -> Table:
    table = Table(title=f"Shape {shape}, {SCATTERED}: recording routes, decode batch {ROUTES_BATCH}, against both off")
    for column in ("variant", "decode step, ms", "cost", "prefill, ms", "cost"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        table.add_row(
            row["variant"],
            f"{1e3 * row['decode_step_s']:.2f}",
            _judged(row["variant"], row["decode_cost"]),
            f"{1e3 * row['prefill_s']:.1f}",
            _judged(row["variant"], row["prefill_cost"]),
        )
    return table


def _judged(variant: str, cost: float) -> str:
    text = f"{100 * cost:+.1f} %"
    return f"[red]{text}[/red]" if variant in ("recorded", "returned") and cost > MAX_COST else text


def _bars(shape: str, rows: list[dict]) -> Bars:
    series = list(rows[0]["tokens_per_s"])
    values = {row["layout"]: list(row["tokens_per_s"].values()) for row in rows}
    return Bars(f"shape {shape}: tokens/s, 2 cores", series, values)

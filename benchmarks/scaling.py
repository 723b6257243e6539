"""Decode tokens a second over context length and over the number of experts, next to what the floor allows.

Prompts are not computed: each request finds all of its prompt but one token in the prefix cache, whose KV is random
numbers.  A step at 8192 tokens of context thus costs the benchmark a step and not a prefill.  The cost of a decode step
does not depend on the values.  Every request has KV of its own.

M has 4 layers here instead of 12, which changes no curve and lets 256 experts and 64 x 8192 tokens of KV fit.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.floor import Machine, decode_step_floor_s, measure_machine
from benchmarks.line_chart import Chart, Line, write_svg
from benchmarks.profile.operators import OperatorTimer
from benchmarks.profile.steps import StepRecorder, num_decoding
from benchmarks.shapes import SHAPES, cached_checkpoint
from examples.make_checkpoint.run import CheckpointSpec
from rollout.core.messages.io_struct import FlushCacheReqInput
from rollout.core.specs.layer_specs import FullKV
from rollout.memory.available import available_memory_bytes
from rollout.memory.kv_pool import KVPool, kv_bytes_per_token
from rollout.server.engine import Engine

BATCHES = (8, 64)
CONTEXTS = (128, 512, 2048, 8192)
EXPERTS = (8, 16, 32, 64, 128, 256)
STEPS = 16
LAYERS = 4
CONTEXT_LENGTH = 16384
RANDOM_BLOCK = 4096  # slots of KV that differ; the pool repeats them
KEPT_SLOTS = 16  # for each request, beyond its prompt and output


@dataclass(frozen=True)
class Point:
    """One measurement: `batch` requests at `context` tokens, with `experts` experts."""

    batch: int
    context: int
    experts: int

    @property
    def slots(self) -> int:
        return self.batch * (self.context + STEPS + KEPT_SLOTS)


def run(shape: str, rounds: int, console: Console, svg: Path | None) -> list[dict]:
    """Measure a shape, print two tables, draw a picture into `svg` if it is given, and return the tables' rows.

    A point that does not fit in memory is a row, too.
    """
    base = SHAPES[shape].experts
    sweeps = {
        "context": [Point(batch, context, base) for context in CONTEXTS for batch in BATCHES],
        "experts": [Point(batch, CONTEXTS[0], experts) for experts in EXPERTS for batch in BATCHES],
    }
    rows, machines = [], []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"scaling, shape {shape}", total=sum(len(points) for points in sweeps.values()))
        for sweep, points in sweeps.items():
            for experts in dict.fromkeys(point.experts for point in points):
                chosen = [point for point in points if point.experts == experts]
                machines.append(measure_machine())
                rows += [row | {"sweep": sweep} for row in _measure_model(shape, experts, chosen, rounds)]
                progress.advance(task, len(chosen))
    machine = _best(machines)
    rows = [row | _beside_floor(row, machine) for row in rows]
    for sweep in sweeps:
        _print([row for row in rows if row["sweep"] == sweep], rounds, console)
    if svg is not None:
        charts = [_chart([row for row in rows if row["sweep"] == sweep]) for sweep in sweeps]
        write_svg(svg, [chart for chart in charts if chart.lines])
        console.print(f"wrote {svg}")
    return rows


def _spec(shape: str, experts: int) -> CheckpointSpec:
    return dataclasses.replace(SHAPES[shape], layers=LAYERS, experts=experts, context_length=CONTEXT_LENGTH)


def _measure_model(shape: str, experts: int, points: list[Point], rounds: int) -> list[dict]:
    """Return the rows of one model."""
    spec = _spec(shape, experts)
    folder = cached_checkpoint(f"{shape}-{LAYERS}-layers-{experts}-experts", spec)
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    slot_bytes = kv_bytes_per_token([FullKV(spec.kv_heads, spec.head_dim)] * spec.layers, torch.bfloat16)
    # A part of the weights is there twice while they are loaded.
    room = available_memory_bytes() - 2 * weight_bytes
    fitting = [point for point in points if point.slots * slot_bytes <= room]
    seconds: dict[Point, float] = {}
    if fitting:
        engine = _engine(folder, max(point.slots for point in fitting))
        seconds = _measure(engine, fitting, rounds, spec.vocab_size)
        engine.close()
    rows = []
    for point in points:
        row = {"shape": shape, **dataclasses.asdict(point)}
        if point in seconds:
            row["tokens_per_s"] = point.batch / seconds[point]
        else:
            needed = (2 * weight_bytes + point.slots * slot_bytes) / 1e9
            row["not measured"] = f"needs {needed:.1f} GB, {(room + 2 * weight_bytes) / 1e9:.1f} were free"
        rows.append(row)
    return rows


def _engine(folder: Path, slots: int) -> Engine:
    engine = Engine(model_path=str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=slots)
    _fill(engine.scheduler.runner.kv_pool)
    return engine


def _fill(pool: KVPool) -> None:
    """Fill the whole pool with random numbers."""
    generator = torch.Generator().manual_seed(0)
    for part in (*pool.k, *pool.v):
        block = torch.randn(RANDOM_BLOCK, *part.shape[1:], generator=generator).to(part.dtype)
        for rows in part.split(RANDOM_BLOCK):
            rows.copy_(block[: rows.shape[0]])


def _measure(engine: Engine, points: list[Point], rounds: int, vocab_size: int) -> dict[Point, float]:
    """Return the median seconds of each point's decode step; the points take turns in random order."""
    rng = random.Random(0)
    steps: dict[Point, list[float]] = {point: [] for point in points}
    timer = OperatorTimer(Machine(1.0, 1.0, 1.0))  # never switched on
    for turn in range(rounds + 1):  # turn 0 warms up
        for point in rng.sample(points, len(points)):
            prompts = _prompts(rng, point, vocab_size)
            _cache_prompts(engine, prompts)
            recorder = StepRecorder(partial(num_decoding, engine.scheduler.queues), timer)
            engine.scheduler.stats = recorder
            params = {"temperature": 0.0, "max_new_tokens": 2 + STEPS, "ignore_eos": True}
            engine.generate(input_ids=prompts, sampling_params=params)
            engine.control(FlushCacheReqInput)
            if turn:
                # The last step also ends the requests.
                decodes = [step for step in recorder.steps[:-1] if step.num_decodes == point.batch]
                assert len(decodes) == STEPS, (point, len(decodes))
                steps[point] += [step.total_seconds for step in decodes]
    return {point: median(seconds) for point, seconds in steps.items()}


def _prompts(rng: random.Random, point: Point, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens, no two of which begin alike."""
    first = rng.sample(range(vocab_size), point.batch)
    return [[token, *(rng.randrange(vocab_size) for _ in range(point.context - 1))] for token in first]


def _cache_prompts(engine: Engine, prompts: list[list[int]]) -> None:
    """Let all but the last token of each prompt be found in the prefix cache, with any KV in its slots."""
    cache, runner = engine.scheduler.cache, engine.scheduler.runner
    epoch = runner.state.epoch.weight_epoch
    for prompt in prompts:
        slots = cache.allocator.alloc(len(prompt) - 1)
        _, known = cache.prefix_cache.insert((None, epoch), np.array(prompt[:-1]), slots)
        assert known == 0, "two prompts begin alike"
        runner.kv_pool.stamp(slots, epoch)
    cache.check()


def _best(machines: list[Machine]) -> Machine:
    """Return the most that the machine could do at any time of the run."""
    return Machine(*(max(values) for values in zip(*(dataclasses.astuple(machine) for machine in machines))))


def _beside_floor(row: dict, machine: Machine) -> dict:
    spec = _spec(row["shape"], row["experts"])
    floor = row["batch"] / decode_step_floor_s(spec, row["batch"], row["context"] + STEPS // 2, machine)
    share = {"floor_share": row["tokens_per_s"] / floor} if "tokens_per_s" in row else {}
    return {"floor_tokens_per_s": floor, **share, "machine": dataclasses.asdict(machine)}


def _print(rows: list[dict], rounds: int, console: Console) -> None:
    sweep, shape = rows[0]["sweep"], rows[0]["shape"]
    steps = f"medians of {rounds * STEPS} steps"
    table = Table(title=f"Shape {shape} ({LAYERS} layers), bf16, greedy: decode tokens/s over {sweep}, {steps}")
    for column in (sweep, "batch", "tokens/s", "floor", "share"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [str(row[sweep]), str(row["batch"])]
        if "not measured" in row:
            cells += [row["not measured"], f"{row['floor_tokens_per_s']:.0f}", ""]
        else:
            share = f"{100 * row['floor_share']:.0f} %"
            cells += [f"{row['tokens_per_s']:.0f}", f"{row['floor_tokens_per_s']:.0f}", share]
        table.add_row(*cells)
    console.print(table)
    machine = Machine(**rows[0]["machine"])
    console.print(
        f"floor: {machine.read_bytes_per_s / 1e9:.1f} GB/s, {machine.bf16_flops_per_s / 1e9:.0f} GFLOP/s bf16"
    )


def _chart(rows: list[dict]) -> Chart:
    sweep, shape = rows[0]["sweep"], rows[0]["shape"]
    lines = []
    for batch in BATCHES:
        points = [row for row in rows if row["batch"] == batch and "not measured" not in row]
        for key, dashed, name in (("tokens_per_s", False, "batch"), ("floor_tokens_per_s", True, "floor, batch")):
            if points:
                lines.append(Line(f"{name} {batch}", [(row[sweep], row[key]) for row in points], dashed))
    label = "tokens of context" if sweep == "context" else "experts, at fixed active size"
    return Chart(f"shape {shape}: decode tokens/s", label, lines)

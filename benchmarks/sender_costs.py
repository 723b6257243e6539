"""CPU time and memory of a trainer's side of a refresh, for models of many small tensors: what `WeightSender` does
before and between its calls, stage by stage, at the first refresh and at later ones.

    plan          ask the source for its form, find or make the plan, take views
    fingerprints  of all tensors
    manifest      the JSON of begin, the report's texts, the digest
    pack          every bucket into one of two areas

No engine takes part.  Torch has one thread, so that no thread's waiting counts as work.  Fingerprints are computed by
torch alone at first, and then by the engine's compiled operators, which a trainer may load.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc

import torch
from rich.console import Console
from rich.table import Table

from rollout.kernels.build import load_kernels
from weight_sync.block_sums import sums_where_they_lie
from weight_sync.sender.lists import Manifest
from weight_sync.sender.refresh_plan import KeptPlans, Settings
from weight_sync.sender.source import Source

COUNTS = (31_094, 46_000, 69_000)
"""The numbers of names of a 30B model of experts, of DeepSeek-V3 and of Kimi-K2."""
SHAPES = ((64, 64), (64,))
FOLLOWING = 5
GOAL_US = 6.0
BUCKET_BYTES = 256 << 20  # as the sender has it by default
TRACED = 5000
"""Tensors of the plan whose memory is measured, which slows it down."""
STAGES = ("plan", "fingerprints", "manifest", "pack")

Named = list[tuple[str, torch.Tensor]]


def run(console: Console) -> list[dict]:
    """Measure all sizes, print one table, and return its rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Operators stay loaded: a process that has them measures them alone.
        rows = [] if sums_where_they_lie(torch.device("cpu")) else _measure_all("torch")
        rows += _measure_all("compiled") if load_kernels().available else []
    finally:
        torch.set_num_threads(threads)
    _print(rows, console)
    return rows


def _measure_all(operators: str) -> list[dict]:
    return [{"operators": operators} | _measure(count, shape) for shape in SHAPES for count in COUNTS]


def _measure(count: int, shape: tuple[int, ...]) -> dict:
    named = [
        (f"model.layers.{i % 60}.mlp.experts.{i}.gate_proj.weight", torch.randn(shape).bfloat16()) for i in range(count)
    ]
    plans = KeptPlans()
    areas = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
    first = _refresh(plans, named, areas)
    following = [_refresh(plans, named, areas) for _ in range(FOLLOWING)]
    means = {stage: statistics.mean(one[stage] for one in following) for stage in STAGES}
    return {
        "part": "sender",
        "tensors": count,
        "bytes": 2 * torch.Size(shape).numel(),
        "first_us": {stage: 1e6 * seconds / count for stage, seconds in first.items()},
        "following_us": {stage: 1e6 * seconds / count for stage, seconds in means.items()},
        "plan_bytes": _plan_bytes(named[:TRACED]) / TRACED,
    }


def _refresh(plans: KeptPlans, named: Named, areas: list[torch.Tensor]) -> dict[str, float]:
    """Return the seconds of CPU by stage."""
    times = [time.process_time()]
    source = Source(named)
    plan = plans.find(source, _settings(), None)
    gatherer = plan.gatherer(source, None)
    times.append(time.process_time())
    fingerprints = gatherer.fingerprints()
    times.append(time.process_time())
    manifest = Manifest(plan.contents.lists, fingerprints).as_lists()
    assert isinstance(manifest, dict)
    b"".join(manifest[key].json for key in ("names", "dtypes", "shapes"))
    fingerprints.by_name(plan.contents.lists.names)
    plan.contents.digest(fingerprints)
    times.append(time.process_time())
    for number, bucket in enumerate(plan.layout.buckets):
        for _ in gatherer.gather(bucket, areas[number % 2][: bucket.num_bytes]):
            pass  # a piece is packed when it is asked for
        _ = [lists.json for lists in vars(bucket.lists).values() if lists is not None]
    times.append(time.process_time())
    return {stage: end - start for stage, start, end in zip(STAGES, times, times[1:])}


def _plan_bytes(named: Named) -> int:
    """Return the memory of a plan that has been used, without the sender's areas."""
    plans = KeptPlans()
    areas = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
    gc.collect()
    tracemalloc.start()
    _refresh(plans, named, areas)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept


def _settings() -> Settings:
    return Settings(None, True, BUCKET_BYTES, torch.device("cpu"), None)


def _print(rows: list[dict], console: Console) -> None:
    table = Table(title="The sender's CPU time, us a tensor: the first refresh, and the mean of five more")
    for column in ("tensors", "bytes", "operators", "refresh", *STAGES, "sum", "plan, bytes a tensor"):
        table.add_column(column, justify="right")
    for row in rows:
        for refresh in ("first", "following"):
            spent = row[f"{refresh}_us"]
            total = sum(spent.values())
            bad = refresh == "following" and total > GOAL_US
            table.add_row(
                f"{row['tensors']:,}",
                f"{row['bytes']:,}",
                row["operators"],
                refresh,
                *(f"{spent[stage]:.2f}" for stage in STAGES),
                f"[red]{total:.1f}[/red]" if bad else f"{total:.1f}",
                f"{row['plan_bytes']:.0f}",
            )
    console.print(table)
    console.print(f"Bound: {GOAL_US:g} us a tensor from the second refresh on.")

"""The planners next to DeepSeek's published algorithm: balance, duplicates, copies and time, in one run.

The reference is `tests/eplb_reference.py`, written from the published description with torch scalars, layer by layer,
item by item, as the published code computes; `test_deepseek.py` holds `deepseek` to its maps.  Times are
processor seconds of one thread for the whole model.

    fresh    balanced against the reference, on the same loads
    moves    min_move against the reference, from the balanced placement of loads before they drifted
            (the reference's maps come from `deepseek`, which makes the same ones)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.eplb_loads import drift, synthetic
from eplb.algorithms.balanced import balanced
from eplb.algorithms.bounds import balancedness, cross_rank_copies, even_split_bound
from eplb.algorithms.deepseek import deepseek
from eplb.algorithms.min_move import min_move
from eplb.algorithms.types import ExpertLayout, Plan, count_duplicates, even_split
from tests.eplb_reference import reference_global

MODELS = ((58, 256, 288, 32), (61, 384, 416, 32), (61, 384, 448, 64), (94, 128, 160, 32))  # layers, E, slots, ranks
LOADS = ("zipf:0.5", "zipf:0.8", "zipf:1.0", "zipf:1.2", "lognormal:1")
DRIFTS = (0.1, 0.3)
Result = TypeVar("Result")


def run(console: Console) -> list[dict[str, Any]]:
    """Compare the planners, print both tables, and return their rows."""
    fresh, moves = [], []
    for layers, experts, slots, ranks in MODELS:
        layout = ExpertLayout(num_logical_experts=experts, num_physical_experts=slots, num_ranks=ranks)
        for loads in LOADS:
            counts = synthetic(loads, layers, experts)
            case = {"model": f"{layers}x{experts}->{slots}", "ranks": ranks, "loads": loads}
            in_force, row = _fresh(counts, layout)
            fresh.append({"part": "planners-fresh"} | case | row)
            for sigma in DRIFTS:
                row = _moved(drift(counts, sigma), layout, in_force)
                moves.append({"part": "planners-moves"} | case | {"drift": sigma} | row)
    for title, rows in (("Fresh placements", fresh), ("After drift", moves)):
        console.print(_table(title, rows))
    return fresh + moves


def _fresh(counts_LE: np.ndarray, layout: ExpertLayout) -> tuple[Plan, dict[str, Any]]:
    theirs, their_seconds = _timed(lambda: _reference(counts_LE, layout))
    ours, seconds = _timed(lambda: balanced(counts_LE, layout))
    return ours, {
        "balanced": float(balancedness(counts_LE, ours).mean()),
        "least": float(balancedness(counts_LE, ours).min()),
        "bound": float(even_split_bound(counts_LE, layout).mean()),
        "reference": float(balancedness(counts_LE, theirs).mean()),
        "duplicates": count_duplicates(ours.physical_to_logical_LP, layout),
        "ref. duplicates": count_duplicates(theirs.physical_to_logical_LP, layout),
        "seconds": seconds,
        "ref. seconds": their_seconds,
    }


def _moved(counts_LE: np.ndarray, layout: ExpertLayout, in_force: Plan) -> dict[str, Any]:
    theirs = deepseek(counts_LE, layout)
    ours, seconds = _timed(lambda: min_move(counts_LE, layout, in_force.physical_to_logical_LP))

    def copied(plan: Plan) -> float:
        """Return the slots that a plan copies between ranks, in percent of all slots."""
        copies = cross_rank_copies(in_force.physical_to_logical_LP, plan.physical_to_logical_LP, layout)
        return float(100 * copies.sum() / plan.physical_to_logical_LP.size)

    return {
        "stale": float(balancedness(counts_LE, in_force).mean()),
        "min_move": float(balancedness(counts_LE, ours).mean()),
        "least": float(balancedness(counts_LE, ours).min()),
        "reference": float(balancedness(counts_LE, theirs).mean()),
        "copied %": copied(ours),
        "ref. copied %": copied(theirs),
        "seconds": seconds,
    }


def _reference(counts_LE: np.ndarray, layout: ExpertLayout) -> Plan:
    rows = reference_global(torch.from_numpy(counts_LE), layout.num_physical_experts, layout.num_ranks)
    located = np.array(rows)
    return Plan("reference", "", layout, located, even_split(located, layout.num_logical_experts))


def _timed(call: Callable[[], Result]) -> tuple[Result, float]:
    started = time.process_time()
    return call(), time.process_time() - started


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    names = [name for name in rows[0] if name != "part"]
    for name in names:
        table.add_column(name, justify="left" if name in ("model", "loads") else "right")
    for row in rows:
        table.add_row(*(_text(name, row[name]) for name in names))
    return table


def _text(name: str, value: Any) -> str:
    if not isinstance(value, float) or name == "drift":
        return str(value)
    return f"{value:.2f}" if "%" in name or "seconds" in name else f"{value:.4f}"

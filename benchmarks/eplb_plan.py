"""`lockstep eplb-plan`: run a planner on recorded or synthetic loads of experts, and show what it would change.

No server is needed, and nothing is moved.

Shapes: L MoE layers, E logical experts, P physical experts (slots), G ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open

from benchmarks.eplb_heatmap import Panel, heatmap_svg
from benchmarks.eplb_loads import drift, synthetic
from benchmarks.eplb_plan_flags import COUNTS, MAP, SPLIT, parser
from eplb.algorithms.bounds import balancedness, cross_rank_copies, even_split_bound, rank_loads
from eplb.algorithms.registry import make_plan
from eplb.algorithms.types import ExpertLayout, Plan, checked_map, count_duplicates, even_split
from eplb.errors import EplbError, EplbRequestError, LoadsError
from eplb.load_dump import METADATA_KEY

MODEL = "model"


def main(argv: Sequence[str]) -> int:
    """Run the command with the words after its name; return its exit status.  A refusal is one line on stderr."""
    args = parser().parse_args(argv)
    try:
        _run(args)
    except (EplbError, OSError) as error:
        print(f"lockstep eplb-plan: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    if args.bandwidth <= 0 or args.expert_bytes <= 0:
        raise EplbRequestError("--bandwidth and --expert-bytes must be more than 0")
    recorded, model = _counts(args)
    layout = ExpertLayout(
        num_logical_experts=recorded.shape[1],
        num_physical_experts=recorded.shape[1] + args.redundant,
        num_ranks=args.ranks,
        num_nodes=args.nodes,
        num_groups=args.groups,
    )
    current, counts = _current(args, layout, recorded, model)
    started = time.perf_counter()
    plan = make_plan(args.algorithm, counts, layout, current, target=args.target, copies_are_free=args.refresh)
    seconds = time.perf_counter() - started
    before = None
    if current is not None:
        before = Plan("in force", "", layout, current, even_split(current, layout.num_logical_experts))
    report = plan_report(counts, before, plan, args.expert_bytes, args.bandwidth) | {"planning_s": seconds}
    if args.svg is not None:
        panels = [] if before is None else [Panel("in force, even split", rank_loads(counts, before))]
        args.svg.write_text(heatmap_svg([*panels, Panel(plan.algorithm, rank_loads(counts, plan))]))
    if args.output is not None:
        content = {MAP: plan.physical_to_logical_LP.tolist(), SPLIT: plan.split_LP.tolist()}
        content |= {} if model is None else {MODEL: model}
        args.output.write_text(json.dumps(content) + "\n")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        Console().print(_table(report))


def plan_report(
    counts_LE: np.ndarray, before: Plan | None, plan: Plan, expert_bytes: float, bandwidth_gb: float
) -> dict[str, Any]:
    """Return the numbers of a plan: balancedness before and after, copies between ranks, their bytes and time.

    Without a placement in force every slot is received.  The rank that receives most determines the time.
    """
    layout = plan.layout
    after_LG = plan.physical_to_logical_LP
    if before is None:
        received_LG = np.full((len(counts_LE), layout.num_ranks), layout.slots_per_rank)
    else:
        received_LG = cross_rank_copies(before.physical_to_logical_LP, after_LG, layout)
    copies = int(received_LG.sum())
    return {
        "algorithm": plan.algorithm,
        "reason": plan.reason,
        "layers": len(counts_LE),
        "logical_experts": layout.num_logical_experts,
        "slots": layout.num_physical_experts,
        "ranks": layout.num_ranks,
        "balancedness_before": None if before is None else _mean_and_least(balancedness(counts_LE, before)),
        "balancedness_after": _mean_and_least(balancedness(counts_LE, plan)),
        "even_split_bound": _mean_and_least(even_split_bound(counts_LE, layout)),
        "duplicates_on_a_rank": count_duplicates(after_LG, layout),
        "copies": copies,
        "copied_share_of_slots": copies / after_LG.size,
        "bytes": copies * expert_bytes,
        "seconds": float(received_LG.sum(axis=0).max() * expert_bytes / (bandwidth_gb * 1e9)),
    }


def _mean_and_least(values_L: np.ndarray) -> dict[str, float]:
    return {"mean": float(values_L.mean()), "least": float(values_L.min())}


def _table(report: dict[str, Any]) -> Table:
    table = Table(
        title=f"{report['layers']} layers, {report['logical_experts']} experts in {report['slots']} slots "
        f"on {report['ranks']} ranks"
    )
    table.add_column("fact")
    table.add_column("value", justify="right")
    table.add_row("reason", report["reason"])
    for name in ("balancedness_before", "balancedness_after", "even_split_bound"):
        value = report[name]
        text = "-" if value is None else f"{value['mean']:.4f} (least {value['least']:.4f})"
        table.add_row(name.replace("_", " "), text)
    table.add_row("experts twice on a rank", str(report["duplicates_on_a_rank"]))
    table.add_row("copies between ranks", f"{report['copies']} ({report['copied_share_of_slots']:.2%} of slots)")
    table.add_row("bytes", f"{report['bytes'] / 1e9:.2f} GB")
    table.add_row("time of the busiest rank", f"{report['seconds'] * 1e3:.1f} ms")
    table.add_row("planning", f"{report['planning_s']:.2f} s")
    return table


# --- input ------------------------------------------------------------------------------------------------------------


def _counts(args: argparse.Namespace) -> tuple[np.ndarray, Any]:
    """Return counts [L, E], and the facts in the file about its model, if any."""
    if (args.dump is None) == (args.synthetic is None):
        raise EplbRequestError("give either a file or --synthetic")
    if args.drift is not None and args.synthetic is None:
        raise EplbRequestError("--drift needs --synthetic")
    if args.synthetic is not None:
        if args.layers < 1 or args.experts < 1:
            raise EplbRequestError("--layers and --experts must be at least 1")
        return synthetic(args.synthetic, args.layers, args.experts, args.seed), None
    counts, model = _read(args.dump, COUNTS)
    if counts.ndim == 3:
        counts = counts.sum(axis=0)
    if counts.ndim != 2 or not counts.size:
        raise LoadsError(f"{COUNTS} in {args.dump} has the shape {list(counts.shape)}, wanted [layers, experts]")
    return counts, model


def _current(
    args: argparse.Namespace, layout: ExpertLayout, recorded_LE: np.ndarray, model: Any
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the placement in force [L, P], or None, and the counts to plan for."""
    if args.current is not None:
        located, its_model = _read(args.current, MAP)
        if model is not None and its_model is not None and model != its_model:
            raise EplbRequestError(f"{args.dump} and {args.current} come from different models: {model}, {its_model}")
        return checked_map(located, layout, len(recorded_LE), duplicates=True), recorded_LE
    if args.drift is not None:
        in_force = make_plan("balanced", recorded_LE, layout).physical_to_logical_LP
        return in_force, drift(recorded_LE, args.drift, args.seed + 1)
    return None, recorded_LE


def _read(file: str, name: str) -> tuple[np.ndarray, Any]:
    """Return one array of a JSON or safetensors file, and the model that the file names, or None.

    Nothing that is read is executed.
    """
    path = Path(file)
    try:
        content = _safetensors(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
        if not isinstance(content, dict) or name not in content:
            raise EplbRequestError(f"{path} has no {name}")
        array = np.asarray(content[name])
    except (SafetensorError, ValueError, RecursionError) as error:
        raise EplbRequestError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if array.dtype.kind not in "iuf":
        raise EplbRequestError(f"{name} in {path} is not an array of numbers")
    return array, content.get(MODEL)


def _safetensors(path: Path) -> dict[str, Any]:
    """Return the arrays of a file by name, together with the fields of a dump's header."""
    with safe_open(path, framework="numpy") as file:
        header = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return (header if isinstance(header, dict) else {}) | arrays

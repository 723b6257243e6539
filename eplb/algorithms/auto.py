"""Planners by name, and `auto`, which picks one and says why.

Shapes: L MoE layers, E logical experts, P physical experts (slots).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from eplb.algorithms.balanced import balanced
from eplb.algorithms.bounds import balancedness
from eplb.algorithms.deepseek import deepseek, deepseek_hierarchical
from eplb.algorithms.min_move import min_move
from eplb.algorithms.types import ExpertLayout, Plan, checked_map, find_duplicate
from eplb.errors import EplbRequestError

FRESH: dict[str, Callable[[np.ndarray, ExpertLayout], Plan]] = {
    "deepseek": deepseek,
    "deepseek_hierarchical": deepseek_hierarchical,
    "balanced": balanced,
}
ALGORITHMS = ("auto", "min_move", *FRESH)
TARGET = 0.98  # balancedness beyond which sampling noise of a batch hides the rest
WORTH_A_FRESH_START = 0.02  # balancedness by which `balanced` must be ahead before everything is copied


def make_plan(
    algorithm: str,
    counts_LE: np.ndarray,
    layout: ExpertLayout,
    current_LP: np.ndarray | None = None,
    *,
    target: float = TARGET,
    copies_are_free: bool = False,
) -> Plan:
    """The plan of the named algorithm for `counts_LE` [L, E].

    `current_LP` [L, P] is the placement in force; `copies_are_free` says that every slot is written anyway, as in a
    full weight refresh.  Raises `EplbRequestError` for an unknown name, a target that is not in (0, 1], or `min_move`
    without a placement in force; `LoadsError`, `LayoutError`, `MapError` as the algorithm does.
    """
    if not 0.0 < target <= 1.0:
        raise EplbRequestError(f"the target balancedness must be over 0 and at most 1, got {target}")
    if algorithm == "auto":
        return auto(counts_LE, layout, current_LP, target=target, copies_are_free=copies_are_free)
    if algorithm == "min_move":
        if current_LP is None:
            raise EplbRequestError("min_move needs the placement in force; use `balanced` for a fresh one")
        return min_move(counts_LE, layout, current_LP, target=target)
    if algorithm not in FRESH:
        raise EplbRequestError(f"unknown algorithm {algorithm!r}: one of {', '.join(ALGORITHMS)}")
    return FRESH[algorithm](counts_LE, layout)


def auto(
    counts_LE: np.ndarray,
    layout: ExpertLayout,
    current_LP: np.ndarray | None = None,
    *,
    target: float = TARGET,
    copies_are_free: bool = False,
) -> Plan:
    """`balanced` where nothing has to be kept, `min_move` otherwise; `Plan.reason` says why.

    `deepseek` and `deepseek_hierarchical` are only used when named: they put experts twice on a rank.
    """
    if current_LP is None:
        return _because(balanced(counts_LE, layout), "no placement is in force")
    if copies_are_free:
        return _because(balanced(counts_LE, layout), "every slot is written anyway, so a fresh placement costs nothing")
    current = checked_map(current_LP, layout, len(counts_LE), duplicates=True)
    repeated = find_duplicate(current, layout)
    if repeated is not None:
        layer, rank, expert = repeated
        why = f"the placement in force holds expert {expert} twice on rank {rank} of layer {layer}"
        return _because(balanced(counts_LE, layout), why)
    moved = min_move(counts_LE, layout, current, target=target)
    reached = float(balancedness(counts_LE, moved).mean())
    if reached >= target:
        return _because(moved, f"few copies reach a balancedness of {reached:.4f}; the target is {target:g}")
    fresh = balanced(counts_LE, layout)
    possible = float(balancedness(counts_LE, fresh).mean())
    if possible > reached + WORTH_A_FRESH_START:
        return _because(fresh, f"from the placement in force {reached:.4f} can be reached, afresh {possible:.4f}")
    return _because(moved, f"it reaches {reached:.4f}, and a fresh placement would reach {possible:.4f}")


def _because(plan: Plan, why: str) -> Plan:
    return replace(plan, reason=f"{plan.algorithm}: {why}")

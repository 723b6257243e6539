"""`auto`: picks a planner for each layer and gives the reason.

Shapes: L MoE layers, E logical experts, P physical experts (slots).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb.algorithms import TARGET
from eplb.algorithms.balanced import balanced
from eplb.algorithms.bounds import balancedness
from eplb.algorithms.min_move import min_move
from eplb.algorithms.types import ExpertLayout, Plan, checked_map
from eplb.expert_location import find_duplicate

ROUNDING = 1e-4  # balancedness under the target that still counts as reached
WORTH_A_FRESH_START = 0.02  # balancedness by which a fresh placement must be ahead before a whole layer is copied


def auto(
    counts_LE: np.ndarray,
    layout: ExpertLayout,
    current_LP: np.ndarray | None = None,
    *,
    target: float = TARGET,
    copies_are_free: bool = False,
) -> Plan:
    """Plan with `balanced` where nothing has to be kept, with `min_move` otherwise; `Plan.reason` states why.

    A layer in which `min_move` misses the target is placed afresh if that is far ahead.  No layer is worse than the
    placement in force under its best split.  `deepseek` and `deepseek_hierarchical` are only used when named: they put
    experts twice on a rank.
    """
    if current_LP is None:
        return _because(_afresh(counts_LE, layout, target), "no placement is in force")
    current = checked_map(current_LP, layout, len(counts_LE), duplicates=True)
    repeated = find_duplicate(current, layout.num_ranks)
    if repeated is not None:
        layer, rank, expert = repeated
        why = f"the placement in force holds expert {expert} twice on rank {rank} of layer {layer}"
        return _because(_afresh(counts_LE, layout, target), why)
    if copies_are_free:
        return _free(counts_LE, layout, current, target)
    moved = min_move(counts_LE, layout, current, target=target)
    reached_L = balancedness(counts_LE, moved)
    if (reached_L >= target - ROUNDING).all():
        return _because(moved, f"few copies reach a balancedness of {reached_L.mean():.4f}; the target is {target:g}")
    fresh = _afresh(counts_LE, layout, target)
    possible_L = balancedness(counts_LE, fresh)
    ahead_L = (reached_L < target - ROUNDING) & (possible_L > reached_L + WORTH_A_FRESH_START)
    if not ahead_L.any():
        return _because(moved, f"it reaches {reached_L.mean():.4f}, and a fresh placement {possible_L.mean():.4f}")
    why = f"from the placement in force {reached_L[ahead_L].mean():.4f} can be reached, "
    why += f"afresh {possible_L[ahead_L].mean():.4f}"
    if ahead_L.all():
        return _because(fresh, why)
    placed = f"{ahead_L.sum()} of {len(ahead_L)} layers {'is' if ahead_L.sum() == 1 else 'are'} placed afresh"
    return _because(_mixed(moved, fresh, ahead_L), f"{placed}: there {why}")


def _afresh(counts_LE: np.ndarray, layout: ExpertLayout, target: float) -> Plan:
    """Return the plan of `balanced`; where whole slots fit together badly, with tokens divided by weights."""
    fresh = balanced(counts_LE, layout)
    reached_L = balancedness(counts_LE, fresh)
    if (reached_L >= target).all():
        return fresh
    weighted = min_move(counts_LE, layout, fresh.physical_to_logical_LP, target=target)
    return _mixed(fresh, weighted, balancedness(counts_LE, weighted) > reached_L)


def _free(counts_LE: np.ndarray, layout: ExpertLayout, current_LP: np.ndarray, target: float) -> Plan:
    """Return the best placement that is found, however much it moves."""
    why = "a full refresh writes every slot, so a fresh placement costs nothing"
    fresh = _afresh(counts_LE, layout, target)
    reached_L = balancedness(counts_LE, fresh)
    if (reached_L >= target - ROUNDING).all():
        return _because(fresh, why)
    moved = min_move(counts_LE, layout, current_LP, target=target)
    better_L = balancedness(counts_LE, moved) > reached_L
    if better_L.any():
        why += f"; {better_L.sum()} of {len(better_L)} layers are better off with the one in force"
    return _because(_mixed(fresh, moved, better_L), why)


def _mixed(first: Plan, second: Plan, second_L: np.ndarray) -> Plan:
    """Return `first`, with the layers [L] bool of `second`."""
    take = second_L[:, None]
    return replace(
        first,
        physical_to_logical_LP=np.where(take, second.physical_to_logical_LP, first.physical_to_logical_LP),
        split_LP=np.where(take, second.split_LP, first.split_LP),
    )


def _because(plan: Plan, why: str) -> Plan:
    return replace(plan, reason=f"{plan.algorithm}: {why}")

"""Planners by name.  A planner is a file and a line here: a function of that name, from counts and layout to a plan."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eplb.algorithms import TARGET
from eplb.errors import EplbRequestError

if TYPE_CHECKING:  # so that a command line that lists the planners loads neither numpy nor torch
    import numpy as np

    from eplb.algorithms.types import ExpertLayout, Plan

# name -> (module, arguments of the planner in addition to counts and layout)
PLANNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "auto": ("eplb.algorithms.auto", ("current_LP", "target", "copies_are_free")),
    "min_move": ("eplb.algorithms.min_move", ("current_LP", "target")),
    "deepseek": ("eplb.algorithms.deepseek", ()),
    "deepseek_hierarchical": ("eplb.algorithms.deepseek", ()),
    "balanced": ("eplb.algorithms.balanced", ()),
    "balanced_by_node": ("eplb.algorithms.balanced_by_node", ()),
}


def require_planner(algorithm: str) -> None:
    """Raise `EplbRequestError` for an unknown name."""
    if algorithm not in PLANNERS:
        raise EplbRequestError(f"unknown algorithm {algorithm!r}; choose from {', '.join(PLANNERS)}")


def make_plan(
    algorithm: str,
    counts_LE: np.ndarray,
    layout: ExpertLayout,
    current_LP: np.ndarray | None = None,
    *,
    target: float = TARGET,
    copies_are_free: bool = False,
) -> Plan:
    """Return the plan of the named algorithm for `counts_LE` [L, E].

    `current_LP` [L, P] is the placement in force; `copies_are_free` means that every slot is written anyway, as in a
    full weight refresh.  Raises `EplbRequestError` for an unknown name, a target that is not in (0, 1], or `min_move`
    without a placement in force; `LoadsError`, `LayoutError`, `MapError` as the algorithm does.
    """
    require_planner(algorithm)
    if not 0.0 < target <= 1.0:
        raise EplbRequestError(f"the target balancedness must be above 0 and at most 1, got {target}")
    module, takes = PLANNERS[algorithm]
    given: dict[str, Any] = {"current_LP": current_LP, "target": target, "copies_are_free": copies_are_free}
    planner: Callable[..., Plan] = getattr(import_module(module), algorithm)
    return planner(counts_LE, layout, **{name: given[name] for name in takes})

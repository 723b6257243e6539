"""Cases of `fused_experts` of which the last has no token."""

from __future__ import annotations

from typing import Any

from rollout.kernels.ops import Ops
from tests.kernels import expert_weights
from tests.operators import Arguments, D, E, K, T, rand
from tests.operators.norm_route import IDS

INNER = 5


def case(**others: Any) -> Arguments:
    weights = {"w13": rand(E, 2 * INNER, D), "w2": rand(E, D, INNER), "inner_size": INNER}
    return {"hidden": rand(T, D), "ids": IDS % (E - 1), "weights": rand(T, K).abs(), **weights, **others}


CASES = {
    "": case(),
    "clamped": case(w13_bias=rand(E, 2 * INNER), w2_bias=rand(E, D), limit=1.0, alpha=1.7),
}


def stored(ops: Ops, arguments: Arguments) -> Arguments:
    w13, w2, _ = expert_weights(ops, arguments["w13"], arguments["w2"])
    return arguments | {"w13": w13, "w2": w2}

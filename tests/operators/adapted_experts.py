"""Cases of `adapted_experts`: rows of three adapters and of none, with gate, up or down left as they are."""

from __future__ import annotations

from typing import Any

import torch

from tests.operators import Arguments, D, E, rand
from tests.operators.add_lora import SLOTS
from tests.operators.fused_experts import INNER, case, stored

S, R = 3, 18
RANKS = torch.tensor([[18, 18, 18], [3, 16, 1], [0, 17, 0], [5, 0, 18], [0, 0, 0], [1, 1, 7]])


def adapted(**others: Any) -> Arguments:
    matrices = {
        "a13": rand(E, S, 2, D, R) / 4,
        "b13": rand(E, S, R, 2 * INNER) / 4,
        "a2": rand(E, S, INNER, R) / 4,
        "b2": rand(E, S, R, D) / 4,
    }
    ranks = torch.stack([RANKS.roll(slot, 0) for slot in range(S)], dim=1)
    return (
        case(**{"w13_bias": None, "w2_bias": None, "limit": None, "alpha": 1.0} | others)
        | matrices
        | {
            "slots": SLOTS,
            "ranks": ranks,
        }
    )


CASES = {
    "": adapted(),
    "clamped": adapted(w13_bias=rand(E, 2 * INNER), w2_bias=rand(E, D), limit=1.0, alpha=1.7),
    "outputs": adapted(weights=None),
}

__all__ = ["CASES", "stored"]

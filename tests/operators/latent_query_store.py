"""Cases of `latent_query_store`."""

from __future__ import annotations

import torch

from rollout.kernels.ops import Ops
from rollout.kernels.places import LatentSizes
from tests.kernels import angles
from tests.operators import Arguments, T, rand

HEADS, SIZES = 3, (4, 4, 5)
CASES = {
    "": {
        "query": rand(T, HEADS * (4 + 2)),
        "latent": rand(T, 7),
        "norm_weight": rand(5),
        "eps": 1e-6,
        "weight": rand(HEADS * (4 + 4), 5),
        "num_heads": HEADS,
        "angles": angles(2, 32, torch.float64, torch.arange(T)),
        "pool": torch.zeros(T, 1, 7, dtype=torch.float64),
        "slots": torch.arange(T),
    }
}
CASES["queries of heads"] = CASES[""] | {"weight": None}


def stored(ops: Ops, arguments: Arguments) -> Arguments:
    if arguments["weight"] is None:
        return arguments
    weight, (nope, value, rank) = arguments["weight"], SIZES
    sizes = LatentSizes(nope, value, rank)
    held = ops.storage.empty_latent(HEADS, sizes, weight.dtype, "cpu")
    ops.storage.latent_place(held, sizes).write(weight)
    return arguments | {"weight": held}

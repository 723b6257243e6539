"""Cases of `latent_values`."""

from __future__ import annotations

from rollout.kernels.ops import Ops
from rollout.kernels.places import LatentSizes
from tests.operators import Arguments, T, rand

HEADS, SIZES = 3, (4, 4, 5)
CASES = {"": {"latents": rand(T, HEADS * 5), "weight": rand(HEADS * 8, 5), "num_heads": HEADS, "value_size": 4}}


def stored(ops: Ops, arguments: Arguments) -> Arguments:
    weight, (nope, value, rank) = arguments["weight"], SIZES
    sizes = LatentSizes(nope, value, rank)
    held = ops.storage.empty_latent(HEADS, sizes, weight.dtype, "cpu")
    ops.storage.latent_place(held, sizes).write(weight)
    return arguments | {"weight": held}

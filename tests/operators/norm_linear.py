"""Cases of `norm_linear`."""

from __future__ import annotations

from rollout.kernels.ops import Ops
from tests.kernels import matrix
from tests.operators import Arguments, D, T, rand

NORM = {"residual": rand(T, D), "hidden": None, "norm_weight": rand(D), "eps": 1e-6, "weight_offset": 1.0}
CASES = {"": {**NORM, "weight": rand(5, D), "out_size": 5, "bias": rand(5)}}


def stored(ops: Ops, arguments: Arguments) -> Arguments:
    return arguments | {"weight": matrix(ops, arguments["weight"])}

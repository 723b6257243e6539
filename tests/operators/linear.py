"""Cases of `linear`."""

from __future__ import annotations

from rollout.kernels.ops import Ops
from tests.kernels import matrix
from tests.operators import Arguments, D, T, rand

CASES = {
    "": {"hidden": rand(T, D), "weight": rand(5, D), "out_size": 5, "bias": rand(5)},
    "no bias": {"hidden": rand(T, D), "weight": rand(5, D), "out_size": 5},
}


def stored(ops: Ops, arguments: Arguments) -> Arguments:
    return arguments | {"weight": matrix(ops, arguments["weight"])}

"""Cases of `matrix_rows`."""

from __future__ import annotations

import torch

from rollout.kernels.ops import Ops
from tests.kernels import matrix
from tests.operators import Arguments, D, rand

CASES = {"": {"weight": rand(7, D), "ids": torch.tensor([1, 4, 1, 0, 6, 2, 2, 2, 5]), "depth": D}}


def stored(ops: Ops, arguments: Arguments) -> Arguments:
    return arguments | {"weight": matrix(ops, arguments["weight"])}

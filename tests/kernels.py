"""The compiled operators for tests, and two checks of what they promise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout.kernels.build import load_kernels
from rollout.layers.ops.native_ops import NativeOps

Rows = Callable[[torch.Tensor], torch.Tensor]  # from the indices of input rows [N] to their results [N, ...]


def native_ops() -> NativeOps:
    """Compiles them if this machine has not done so yet."""
    status = load_kernels()
    assert status.available, status.reason
    return NativeOps()


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in the 2-norm."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def rows_are_independent(compute: Rows, num_rows: int) -> bool:
    """Whether each row has the same bits alone, among a few, among all, in another order, and with 1 or 2 threads."""
    threads = torch.get_num_threads()
    every = torch.arange(num_rows)
    whole = compute(every)
    try:
        torch.set_num_threads(2)
        for _ in range(3):
            if not torch.equal(compute(every), whole):
                return False
    finally:
        torch.set_num_threads(threads)
    shuffled = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    picks = [shuffled, every[:7], every[-5:], *every.split(13), *(every[i : i + 1] for i in range(num_rows))]
    return all(torch.equal(compute(pick), whole[pick]) for pick in picks)

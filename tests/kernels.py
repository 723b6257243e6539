"""The compiled operators for tests, and two checks of their promises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout.core.specs.layer_specs import RotarySpec
from rollout.distributed.parallel import Parallel
from rollout.kernels.build import load_kernels
from rollout.kernels.ops import Ops, compiled_ops, plain_ops
from rollout.layers.build import Build
from rollout.layers.norm_rotary import RotaryTable

Rows = Callable[[torch.Tensor], torch.Tensor]  # from the indices of input rows [N] to their results [N, ...]


def plain_build(dtype: torch.dtype) -> Build:
    """Return the settings that build the layers of one rank in plain torch."""
    return Build(plain_ops(), dtype, "cpu", Parallel())


def angles(dim: int, num_positions: int, dtype: torch.dtype, positions_T: torch.Tensor) -> torch.Tensor:
    """Return rotary angles of theta 10000, [T, 2, dim]."""
    return RotaryTable(RotarySpec(dim=dim, theta=10000.0), num_positions, plain_build(dtype)).angles(positions_T)


def native_ops() -> Ops:
    """Return the compiled operators; compile them if this machine has not done so yet."""
    status = load_kernels()
    assert status.available, status.reason
    return compiled_ops()


def matrix(ops: Ops, weight_OD: torch.Tensor) -> torch.Tensor:
    """Store a matrix as `ops` hold it."""
    rows, depth = weight_OD.shape
    storage = ops.storage.empty_matrix(rows, depth, weight_OD.dtype, "cpu")
    ops.storage.matrix_place(storage, range(rows), depth).write(weight_OD)
    return storage


def expert_weights(ops: Ops, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Store `w13` [P, 2I, D], gate rows before up rows, and `w2` [P, D, I] as `ops` hold them; return both, and I."""
    experts, hidden, inner = w2.shape
    stored = ops.storage.empty_experts(experts, inner, hidden, w2.dtype, "cpu")
    for expert in range(experts):
        gate, up = w13[expert].split(inner)
        for part, content in (("gate_proj", gate), ("up_proj", up), ("down_proj", w2[expert])):
            ops.storage.expert_place(*stored, part, expert, inner, hidden).write(content)  # type: ignore[arg-type]
    return *stored, inner


def linear(ops: Ops, hidden_TD: torch.Tensor, weight_OD: torch.Tensor) -> torch.Tensor:
    return ops.linear(hidden_TD, matrix(ops, weight_OD), weight_OD.shape[0])


def experts(
    ops: Ops,
    hidden_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    return ops.fused_experts(hidden_TD, ids_TK, weights_TK, *expert_weights(ops, w13, w2))


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the 2-norm."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def rows_are_independent(compute: Rows, num_rows: int) -> bool:
    """Return whether rows have the same bits alone, among a few or all, in another order, and with 1 or 2 threads."""
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

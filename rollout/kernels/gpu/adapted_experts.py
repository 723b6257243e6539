"""`adapted_experts` for CUDA: `fused_experts` and four more launches, for weights of every form that it takes.

The products with adapters (`experts_lora`) are added to the float32 sums of gate and up before these are rounded and a
bias is added, and to the rounded output of down with its bias.  A row without an adapter has the bits of the Triton
form of `fused_experts`, to which torch's `grouped_mm` is no alternative here.
"""

from __future__ import annotations

import torch

from rollout.kernels.gpu.experts_lora import Adapters
from rollout.kernels.gpu.fused_experts import TRITON_DTYPES, Matrices, of_matrices, write_outputs
from rollout.kernels.operators import OPERATORS
from rollout.kernels.operators.fused_experts import ExpertOutputs


def adapted_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    limit: float | None,
    alpha: float,
    slots: torch.Tensor,
    a13: torch.Tensor,
    b13: torch.Tensor,
    a2: torch.Tensor,
    b2: torch.Tensor,
    ranks: torch.Tensor,
    *,
    expected: int | None = None,
) -> torch.Tensor:
    """Compute the operator; ids without an expert are empty slots and `expected` is a guess, as in `fused_experts`.

    float64 is computed by plain torch.
    """
    adapters = Adapters(slots.contiguous(), a13, b13, a2, b2, ranks)
    if hidden.dtype not in TRITON_DTYPES:
        base = hidden, ids, weights, w13, w2, inner_size, w13_bias, w2_bias, limit, alpha
        plain: torch.Tensor = OPERATORS["adapted_experts"].plain(*base, *adapters)
        return plain
    held = Matrices(w13, w2, w13_bias, w2_bias)
    return of_matrices(hidden, ids, weights, held, limit, alpha, adapters, expected)


def adapted_outputs(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    limit: float | None,
    alpha: float,
    slots: torch.Tensor,
    a13: torch.Tensor,
    b13: torch.Tensor,
    a2: torch.Tensor,
    b2: torch.Tensor,
    ranks: torch.Tensor,
) -> ExpertOutputs:
    """Compute `adapted_experts` but for the sum over slots, which `experts_norm` takes."""
    adapters = Adapters(slots.contiguous(), a13, b13, a2, b2, ranks)
    rows_TKD = hidden.new_empty(*ids.shape, hidden.shape[1])
    write_outputs(hidden, ids.contiguous(), Matrices(w13, w2, w13_bias, w2_bias), limit, alpha, rows_TKD, adapters)
    return ExpertOutputs(rows_TKD, ids.contiguous(), weights.contiguous(), w13.shape[0])

"""`norm_linear`: the norm as a Triton kernel, then the product of `linear`."""

from __future__ import annotations

import torch

from rollout.kernels.gpu.add_rms_norm import add_rms_norm
from rollout.kernels.gpu.linear import linear


def norm_linear(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out_size: int,
    bias: torch.Tensor | None = None,
    weight_offset: float | None = None,
) -> torch.Tensor:
    """Multiply the norm with the weight."""
    return linear(add_rms_norm(residual, hidden, norm_weight, eps, weight_offset), weight, out_size, bias)

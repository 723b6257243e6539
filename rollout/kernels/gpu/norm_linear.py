"""`norm_linear`: the norm as a Triton kernel, the product as torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.kernels.gpu.add_rms_norm import add_rms_norm


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
    """Multiply the norm with the weight, by torch's product: a row's bits may depend on the number of rows."""
    return F.linear(add_rms_norm(residual, hidden, norm_weight, eps, weight_offset), weight, bias)

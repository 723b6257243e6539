"""`norm_linear`: `linear` of `add_rms_norm`."""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator
from rollout.kernels.operators.add_rms_norm import add_rms_norm, rms_norm
from rollout.kernels.operators.linear import linear, only_gradient


def _only_gradient(
    residual: torch.Tensor,
    hidden: None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out_size: int,
    bias: torch.Tensor | None,
    weight_offset: float | None,
) -> torch.Tensor:
    return only_gradient(rms_norm(residual, norm_weight, eps, weight_offset), weight, out_size, bias)


@operator(
    "(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor weight, int out_size, "
    "Tensor? bias=None, float? weight_offset=None) -> Tensor",
    Gradient(flows=("residual", "hidden"), sums=True, weights=("norm_weight", "weight", "bias"), form=_only_gradient),
)
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
    return linear.plain(add_rms_norm.plain(residual, hidden, norm_weight, eps, weight_offset), weight, out_size, bias)

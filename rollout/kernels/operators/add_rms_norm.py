"""`add_rms_norm`: residual += hidden, where there is one, then the root mean square norm of the residual over D.

The norm is rounded, then multiplied with the weight; with an offset it is multiplied with offset + weight in float32,
then rounded.  The sum is written to the residual, so the plain form is differentiable without `hidden` only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.kernels.operator import Gradient, operator


@operator(
    "(Tensor(a!) residual, Tensor? hidden, Tensor weight, float eps, float? weight_offset=None) -> Tensor",
    Gradient(flows=("residual", "hidden"), sums=True, weights=("weight",)),
)
def add_rms_norm(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> torch.Tensor:
    if hidden is not None:
        residual += hidden
    return rms_norm(residual, weight, eps, weight_offset)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float | None) -> torch.Tensor:
    """Compute the root mean square norm over the last dimension, and apply its weight."""
    if weight_offset is None:
        # Without a weight, F.rms_norm rounds once, to the model's dtype; the weight is then applied in that dtype.
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    work_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (F.rms_norm(x.to(work_dtype), x.shape[-1:], None, eps) * (weight_offset + weight.to(work_dtype))).to(x.dtype)

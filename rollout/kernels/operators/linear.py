"""`linear`: hidden @ weight.T + bias [T, O]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rollout.kernels.operator import Gradient, operator


class _Product(torch.autograd.Function):
    """x [T, D] @ weight [O, D].T + bias, of which only the gradient is computed; the result is zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(x.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            gradient @ weight if of_x else None,
            gradient.t() @ x if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def only_gradient(hidden: torch.Tensor, weight: torch.Tensor, out_size: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Return zeros with the gradient of `linear`: a third of the arithmetic of the plain form and its gradient."""
    return _Product.apply(hidden, weight, bias)


@operator(
    "(Tensor hidden, Tensor weight, int out_size, Tensor? bias=None) -> Tensor",
    Gradient(flows=("hidden",), weights=("weight", "bias"), form=only_gradient),
)
def linear(hidden: torch.Tensor, weight: torch.Tensor, out_size: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(hidden, weight, bias)

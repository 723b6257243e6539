"""The dense feed-forward block of a decoder layer: SwiGLU (Shazeer, 2020).

Shapes: T tokens, D hidden, I intermediate.
"""

from __future__ import annotations

import torch

from rollout.layers.context import ForwardContext
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.ops.base import LayerOps


class DenseMLP(Layer):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        self.ops = ops
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, dtype, device, ops)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, device, ops)

    def __call__(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor, norm: RMSNorm, context: ForwardContext
    ) -> torch.Tensor:
        """Of the norm of `residual += hidden`."""
        gate_up_T2I = self.gate_up_proj(residual_TD, hidden_TD, norm)
        return self.down_proj(self.ops.silu_and_mul(gate_up_T2I))

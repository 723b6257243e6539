"""The dense feed-forward block of a decoder layer: SwiGLU (Shazeer, 2020).

Shapes: T tokens, D hidden, I intermediate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rollout.layers.context import ForwardContext
from rollout.layers.linear import Linear, MergedLinear


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2I], gate first -> `silu(gate) * up` [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class DenseMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, dtype, device)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, device)

    def forward(self, hidden_TD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden_TD)))

"""`silu_and_mul`: silu(gate) * up [..., I] of [..., 2I], gate first, silu(gate) rounded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.kernels.operator import Gradient, operator


@operator("(Tensor gate_up) -> Tensor", Gradient(flows=("gate_up",)))
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)

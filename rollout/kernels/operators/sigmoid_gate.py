"""`sigmoid_gate`: hidden [T, N] in groups of N / G neighbours, each times the sigmoid of its gate [T, G], rounded."""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator


@operator("(Tensor hidden, Tensor gate) -> Tensor", Gradient(flows=("hidden", "gate")))
def sigmoid_gate(hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    groups_TGn = hidden.unflatten(1, (gate.shape[1], -1))
    return (groups_TGn * gate.sigmoid().unsqueeze(-1)).flatten(1)

"""Weights as a `Ops` stores them, from plain tensors.

Shapes: O output features, D input features, P physical experts, I expert intermediate.
"""

from __future__ import annotations

import torch

from rollout.kernels.ops import ExpertPart, Ops
from rollout.kernels.places import LatentSizes

PARTS: tuple[ExpertPart, ...] = ("gate_proj", "up_proj", "down_proj")


def stored_matrix(ops: Ops, weight_OD: torch.Tensor) -> torch.Tensor:
    """Store a matrix as `linear` and similar operators take it."""
    rows, depth = weight_OD.shape
    storage = ops.storage.empty_matrix(rows, depth, weight_OD.dtype, "cpu")
    ops.storage.matrix_place(storage, range(rows), depth).write(weight_OD)
    return storage


def stored_experts(
    ops: Ops, gate_PID: torch.Tensor, up_PID: torch.Tensor, down_PDI: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store experts as the operators of experts take them: `w13` and `w2`."""
    experts, inner, hidden = gate_PID.shape
    w13, w2 = ops.storage.empty_experts(experts, inner, hidden, gate_PID.dtype, "cpu")
    for expert in range(experts):
        for part, weights in zip(PARTS, (gate_PID, up_PID, down_PDI), strict=True):
            ops.storage.expert_place(w13, w2, part, expert, inner, hidden).write(weights[expert])
    return w13, w2


def stored_latent(ops: Ops, weight: torch.Tensor, heads: int, sizes: LatentSizes) -> torch.Tensor:
    """Store what makes keys and values of latents [H (nope + v), R], for `latent_query_store` and `latent_values`."""
    stored = ops.storage.empty_latent(heads, sizes, weight.dtype, "cpu")
    ops.storage.latent_place(stored, sizes).write(weight)
    return stored

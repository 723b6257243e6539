"""`latent_values`: weighted means of latents [T, H R] times the stored matrix for values, by head: [T, H v]."""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator


@operator(
    "(Tensor latents, Tensor weight, int num_heads, int value_size) -> Tensor",
    Gradient(flows=("latents",), weights=("weight",)),
)
def latent_values(latents: torch.Tensor, weight: torch.Tensor, num_heads: int, value_size: int) -> torch.Tensor:
    by_head_HTR = latents.unflatten(1, (num_heads, -1)).transpose(0, 1)
    weight_HVR = weight.view(num_heads, -1, weight.shape[1])[:, -value_size:]
    return torch.bmm(by_head_HTR, weight_HVR.transpose(1, 2)).transpose(0, 1).flatten(1)

"""`latent_values` for CUDA: one launch of products by head (`latent_heads`)."""

from __future__ import annotations

import torch

from rollout.kernels.gpu.latent_heads import head_products


def latent_values(latents: torch.Tensor, weight: torch.Tensor, num_heads: int, value_size: int) -> torch.Tensor:
    """Return weighted means of latents [T, H R] times the matrix for values, by head [T, H v]."""
    rank = weight.shape[1]
    weight_HRV = weight.view(num_heads, -1, rank)[:, -value_size:].transpose(1, 2)
    out = torch.empty((latents.shape[0], num_heads, value_size), dtype=latents.dtype, device=latents.device)
    head_products(latents.unflatten(1, (num_heads, rank)), weight_HRV, out)
    return out.flatten(1)

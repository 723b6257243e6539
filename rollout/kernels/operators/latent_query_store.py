"""`latent_query_store`: queries [T, H (nope + rd)] of latent attention in the form that meets latents: [T, H, R + rd].

The first part of each head is multiplied with the stored matrix for keys, the second rotated in pairs 2 i, 2 i + 1 by
angles [T, 2, rd].  Without a matrix the first part stays as it is: [T, H, nope + rd].  The latents [T, R + rd], the
first part normed, the second rotated, are stored in their slots [T] of the pool [S, 1, R + rd].  Gradients reach the
stored rows, not the earlier content of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.kernels.operator import Gradient, operator
from rollout.kernels.operators.add_rms_norm import rms_norm


@operator(
    "(Tensor query, Tensor latent, Tensor norm_weight, float eps, Tensor? weight, int num_heads, Tensor angles, "
    "Tensor(a!) pool, Tensor slots) -> Tensor",
    Gradient(flows=("query", "latent"), weights=("norm_weight", "weight"), pools=("pool",), stored=("pool",)),
)
def latent_query_store(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None,
    num_heads: int,
    angles: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    rotary_dim, rank = angles.shape[-1], norm_weight.shape[0]
    normed, turned_key = latent.split([rank, rotary_dim], dim=-1)
    key = torch.cat((rms_norm(normed, norm_weight, eps, None), rotate_pairs(turned_key, angles.unbind(1))), -1)
    pool.index_copy_(0, slots, key.unsqueeze(1))
    heads_THd = query.unflatten(1, (num_heads, -1))
    plain_THN, turned_THR = heads_THd.split([heads_THd.shape[2] - rotary_dim, rotary_dim], dim=-1)
    if weight is not None:
        absorbed_HNR = weight.view(num_heads, -1, rank)[:, : plain_THN.shape[2]]
        plain_THN = torch.bmm(plain_THN.transpose(0, 1), absorbed_HNR).transpose(0, 1)
    return torch.cat((plain_THN, rotate_pairs(turned_THR, angles.unsqueeze(2).unbind(1))), -1)


def rotate_pairs(x: torch.Tensor, cos_and_sin: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rotate elements 2 i and 2 i + 1 of the last dimension by cos and sign-folded sin."""
    cos, signed_sin = cos_and_sin
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return swapped * signed_sin + x * cos

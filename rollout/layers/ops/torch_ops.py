"""`LayerOps` in plain torch: every device and every float dtype.

Numerics are those of transformers' Qwen3: the norm is computed in float32 and rounded to the model's dtype before the
weight is applied, the rotation is done in the model's dtype.  A float64 model stays in float64 throughout.

Shapes: as in `base`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.layers.moe.expert_compute import apply_experts
from rollout.layers.moe.topk import softmax_topk
from rollout.layers.ops.base import LayerOps, Rotary


class TorchOps(LayerOps):
    """The reference for every other implementation."""

    def linear(self, hidden_TD: torch.Tensor, weight_OD: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_TD, weight_OD)

    def rms_norm(self, hidden_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        # Without a weight, F.rms_norm rounds once, to the model's dtype; the weight is then applied in that dtype.
        return F.rms_norm(hidden_TD, weight_D.shape, None, eps) * weight_D

    def add_rms_norm(
        self, hidden_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual_TD += hidden_TD
        return self.rms_norm(residual_TD, weight_D, eps)

    def heads_to_pool(
        self,
        qkv: torch.Tensor,
        qk_weight: torch.Tensor,
        rotary: Rotary,
        eps: float,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = k_pool.shape[1:]
        num_heads = qk_weight.shape[0] - num_kv_heads
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        query_key, value = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        query, key = norm_and_rotate(query_key, qk_weight, rotary, eps).split([num_heads, num_kv_heads], dim=1)
        k_pool.index_copy_(0, slots_T, key)
        v_pool.index_copy_(0, slots_T, value)
        return query

    def softmax_topk(self, logits_TE: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return softmax_topk(logits_TE, top_k, normalise)

    def experts(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> torch.Tensor:
        outputs_TKD = apply_experts(hidden_TD, physical_ids_TK, w13, w2)
        return outputs_TKD if weights_TK is None else weighted_sum(outputs_TKD, weights_TK)


def weighted_sum(expert_out_TKD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Sum over K in slot order, products rounded to the dtype of the hidden states as in transformers."""
    return (expert_out_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)


def norm_and_rotate(heads: torch.Tensor, weight: torch.Tensor, rotary: Rotary, eps: float) -> torch.Tensor:
    """Per-head RMSNorm of [T, heads, hd] with a weight row for each head, and rotation."""
    return rotate(F.rms_norm(heads, (heads.shape[-1],), None, eps).mul_(weight), *rotary)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, hd].  Rolling by half a head and folding the sign into sin equals rotate-half, bit for bit."""
    return heads.roll(heads.shape[-1] // 2, -1).mul_(signed_sin).add_(heads * cos)

"""`LayerOps` in plain torch: every device and every float dtype.

Numerics are those of transformers' Qwen3: the norm is computed in float32 and rounded to the model's dtype before the
weight is applied, the rotation is done in the model's dtype.  A float64 model stays in float64 throughout.

Shapes: as in `base`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.layers.activation import silu_and_mul
from rollout.layers.moe.expert_compute import apply_experts
from rollout.layers.moe.topk import softmax_topk
from rollout.layers.ops.base import ExpertPart, LayerOps
from rollout.layers.ops.place import Place, ViewPlace


class TorchOps(LayerOps):
    """The reference for every other implementation.  Matrices are row-major; gate rows come before up rows."""

    def empty_matrix(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        return torch.empty(out_features, in_features, dtype=dtype, device=device)

    def matrix_place(self, weight: torch.Tensor, rows: range, in_features: int) -> Place:
        return ViewPlace(weight[rows.start : rows.stop])

    def empty_experts(
        self, experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w13 = torch.empty(experts, 2 * inner, hidden, dtype=dtype, device=device)
        return w13, torch.empty(experts, hidden, inner, dtype=dtype, device=device)

    def expert_place(
        self, w13: torch.Tensor, w2: torch.Tensor, part: ExpertPart, physical_id: int, inner: int, hidden: int
    ) -> Place:
        if part == "down_proj":
            return ViewPlace(w2[physical_id])
        return ViewPlace(w13[physical_id, :inner] if part == "gate_proj" else w13[physical_id, inner:])

    def gather_rows(self, table: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, ids_T)

    def matrix_rows(self, weight: torch.Tensor, ids_T: torch.Tensor, in_features: int) -> torch.Tensor:
        return F.embedding(ids_T, weight)

    def linear(self, hidden_TD: torch.Tensor, weight: torch.Tensor, out_features: int) -> torch.Tensor:
        return F.linear(hidden_TD, weight)

    def add_rms_norm(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if hidden_TD is not None:
            residual_TD += hidden_TD
        # Without a weight, F.rms_norm rounds once, to the model's dtype; the weight is then applied in that dtype.
        return F.rms_norm(residual_TD, weight_D.shape, None, eps) * weight_D

    def norm_linear(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        norm_weight_D: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        out_features: int,
    ) -> torch.Tensor:
        return self.linear(self.add_rms_norm(residual_TD, hidden_TD, norm_weight_D, eps), weight, out_features)

    def norm_route(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        norm_weight_D: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        num_logical_experts: int,
        top_k: int,
        normalise: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed_TD = self.add_rms_norm(residual_TD, hidden_TD, norm_weight_D, eps)
        logits_TE = self.linear(normed_TD, weight, num_logical_experts)
        return normed_TD, *softmax_topk(logits_TE, top_k, normalise)

    def heads_to_pool(
        self,
        qkv: torch.Tensor,
        qk_weight: torch.Tensor,
        angles: torch.Tensor,
        eps: float,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = k_pool.shape[1:]
        num_heads = qk_weight.shape[0] - num_kv_heads
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        query_key, value = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        query, key = norm_and_rotate(query_key, qk_weight, angles, eps).split([num_heads, num_kv_heads], dim=1)
        k_pool.index_copy_(0, slots_T, key)
        v_pool.index_copy_(0, slots_T, value)
        return query

    def silu_and_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up_T2I)

    def experts(
        self,
        hidden_TD: torch.Tensor,
        physical_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
        inner: int,
    ) -> torch.Tensor:
        outputs_TKD = apply_experts(hidden_TD, physical_ids_TK, w13, w2)
        return outputs_TKD if weights_TK is None else weighted_sum(outputs_TKD, weights_TK)


def weighted_sum(expert_out_TKD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Sum over K in slot order, products rounded to the dtype of the hidden states as in transformers."""
    return (expert_out_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)


def norm_and_rotate(heads: torch.Tensor, weight: torch.Tensor, angles: torch.Tensor, eps: float) -> torch.Tensor:
    """Per-head RMSNorm of [T, heads, hd] with a weight row for each head, and rotation."""
    cos, signed_sin = angles.unsqueeze(2).unbind(1)
    return rotate(F.rms_norm(heads, (heads.shape[-1],), None, eps).mul_(weight), cos, signed_sin)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, hd].  Rolling by half a head and folding the sign into sin equals rotate-half, bit for bit."""
    return heads.roll(heads.shape[-1] // 2, -1).mul_(signed_sin).add_(heads * cos)

"""The operators of `schemas` in plain torch: every device and every float dtype; the reference for every other one.

Matrices are row-major; gate rows come before up rows.  Numerics follow transformers: a norm is computed in
float32 and rounded to the model's dtype before its weight is applied (after, where the weight has an offset), the
rotation is done in the model's dtype.  A float64 model stays in float64 throughout.

Shapes: as in `schemas`; G groups of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rollout.kernels.delta_rule import gated_delta
from rollout.kernels.expert_compute import ExpertForm, apply_experts, silu_and_mul

__all__ = ["gated_delta", "silu_and_mul"]


def gather_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, ids)


def matrix_rows(weight: torch.Tensor, ids: torch.Tensor, depth: int) -> torch.Tensor:
    return F.embedding(ids, weight)


def linear(hidden: torch.Tensor, weight: torch.Tensor, out_size: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(hidden, weight, bias)


def add_rms_norm(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> torch.Tensor:
    if hidden is not None:
        residual += hidden
    return _rms_norm(residual, weight, eps, weight_offset)


def norm_linear(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out_size: int,
    bias: torch.Tensor | None = None,
    weight_offset: float | None = None,
) -> torch.Tensor:
    return linear(add_rms_norm(residual, hidden, norm_weight, eps, weight_offset), weight, out_size, bias)


def norm_route(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    num_experts: int,
    top_k: int,
    normalise: bool,
    scoring: str = "softmax",
    scaling: float = 1.0,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    forced_ids: torch.Tensor | None = None,
    weight_offset: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed_TD = add_rms_norm(residual, hidden, norm_weight, eps, weight_offset)
    work_dtype = torch.float64 if normed_TD.dtype == torch.float64 else torch.float32
    if scoring == "softmax":
        scores_TE = choices_TE = F.linear(normed_TD, weight, bias).softmax(dim=-1, dtype=work_dtype)
        least = 0.0
    elif scoring == "softmax_of_chosen":
        scores_TE = choices_TE = F.linear(normed_TD, weight, bias)
        least = 0.0
    else:
        assert scoring == "sigmoid" and bias is None, scoring
        scores_TE = F.linear(normed_TD.to(work_dtype), weight.to(work_dtype)).sigmoid()
        choices_TE = scores_TE if correction_bias is None else scores_TE + correction_bias
        choices_TE = _of_best_groups(choices_TE, num_groups, top_groups)
        least = 1e-20  # DeepSeek-V3's guard against a sum of nothing
    ids_TK = choices_TE.topk(top_k, dim=-1).indices
    if forced_ids is not None:
        ids_TK = torch.where(forced_ids[:, :1] >= 0, forced_ids, ids_TK)
    weights_TK = scores_TE.gather(1, ids_TK)
    if scoring == "softmax_of_chosen":
        weights_TK = weights_TK.softmax(dim=-1, dtype=work_dtype)
    elif normalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + least)
    return normed_TD, (weights_TK * scaling).to(normed_TD.dtype), ids_TK


def qk_norm_rope_store(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    angles: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> torch.Tensor:
    num_kv_heads, head_dim = k_pool.shape[1:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query_key, value = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if weight is not None:
        query_key = _rms_norm(query_key, weight, eps, weight_offset)
    query: torch.Tensor
    query, key = rotate(query_key, angles).split([num_heads, num_kv_heads], dim=1)
    k_pool.index_copy_(0, slots, key)
    v_pool.index_copy_(0, slots, value)
    return query.contiguous()


def latent_query_store(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    num_heads: int,
    angles: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    rotary_dim, rank = angles.shape[-1], norm_weight.shape[0]
    normed, turned_key = latent.split([rank, rotary_dim], dim=-1)
    key = torch.cat((_rms_norm(normed, norm_weight, eps, None), rotate_pairs(turned_key, angles.unbind(1))), -1)
    pool.index_copy_(0, slots, key.unsqueeze(1))
    heads_THd = query.unflatten(1, (num_heads, -1))
    plain_THN, turned_THR = heads_THd.split([heads_THd.shape[2] - rotary_dim, rotary_dim], dim=-1)
    absorbed_HNR = weight.view(num_heads, -1, rank)[:, : plain_THN.shape[2]]
    absorbed = torch.bmm(plain_THN.transpose(0, 1), absorbed_HNR).transpose(0, 1)
    return torch.cat((absorbed, rotate_pairs(turned_THR, angles.unsqueeze(2).unbind(1))), -1)


def latent_values(latents: torch.Tensor, weight: torch.Tensor, num_heads: int, value_size: int) -> torch.Tensor:
    by_head_HTR = latents.unflatten(1, (num_heads, -1)).transpose(0, 1)
    weight_HVR = weight.view(num_heads, -1, weight.shape[1])[:, -value_size:]
    return torch.bmm(by_head_HTR, weight_HVR.transpose(1, 2)).transpose(0, 1).flatten(1)


def sigmoid_gate(hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    groups_TGn: torch.Tensor = hidden.unflatten(1, (gate.shape[1], -1))
    return (groups_TGn * gate.sigmoid().unsqueeze(-1)).flatten(1)


def fused_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> torch.Tensor:
    outputs_TKD = apply_experts(hidden, ids, w13, w2, form=ExpertForm(w13_bias, w2_bias, limit, alpha))
    return outputs_TKD if weights is None else weighted_sum(outputs_TKD, weights)


def weighted_sum(expert_out_TKD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Sum over K in slot order, products rounded to the dtype of the hidden states as in transformers."""
    return (expert_out_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The first rd elements of each head of [T, heads, hd] rotated by angles [T, 2, rd] of cos and sign-folded sin.

    Rolling by half of them and folding the sign into sin equals rotate-half, bit for bit.
    """
    rotary_dim = angles.shape[-1]
    cos, signed_sin = angles.unsqueeze(2).unbind(1)
    turned, kept = heads[..., :rotary_dim], heads[..., rotary_dim:]
    turned = turned.roll(rotary_dim // 2, -1).mul_(signed_sin).add_(turned * cos)
    return turned if kept.shape[-1] == 0 else torch.cat((turned, kept), -1)


def rotate_pairs(x: torch.Tensor, cos_and_sin: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elements 2 i and 2 i + 1 of the last dimension turned by cos and sign-folded sin."""
    cos, signed_sin = cos_and_sin
    swapped: torch.Tensor = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return swapped * signed_sin + x * cos


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float | None) -> torch.Tensor:
    """Over the last dimension."""
    if weight_offset is None:
        # Without a weight, F.rms_norm rounds once, to the model's dtype; the weight is then applied in that dtype.
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    work_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (F.rms_norm(x.to(work_dtype), x.shape[-1:], None, eps) * (weight_offset + weight.to(work_dtype))).to(x.dtype)


def _of_best_groups(choices_TE: torch.Tensor, num_groups: int, top_groups: int) -> torch.Tensor:
    """-inf for experts outside of the best groups; a group counts as much as its two best experts together."""
    if num_groups == 1:
        return choices_TE
    by_group_TGN: torch.Tensor = choices_TE.unflatten(1, (num_groups, -1))
    totals_TG = by_group_TGN.topk(min(2, by_group_TGN.shape[-1]), dim=-1).values.sum(dim=-1)
    best_TG = torch.zeros_like(totals_TG, dtype=torch.bool).scatter_(1, totals_TG.topk(top_groups).indices, True)
    return by_group_TGN.masked_fill(~best_TG.unsqueeze(-1), float("-inf")).flatten(1)

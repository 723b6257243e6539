"""What the operators compute, as formulas that autograd follows: one for each operator of `rollout.kernels.schemas`.

Plain torch of `rollout.kernels.plain` wherever that can be followed; run in float32 (float64 in tests) on the very
inputs that the operator had, for the gradient alone: their results are not used.  `residual` is what the residual stream
is after the operator's sum.  A `product` does not even compute its result.

Shapes: as in `schemas`; N sequences, P positions of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from rollout.kernels import plain
from rollout.kernels.delta_rule import unit
from rollout.kernels.expert_compute import Assignments, ExpertForm, apply_experts, silu_and_mul
from rollout.kernels.plain import latent_values, sigmoid_gate

__all__ = ["latent_values", "sigmoid_gate", "silu_and_mul"]


class _Product(torch.autograd.Function):
    """x [T, D] @ weight [O, D].T + bias, of which only the gradient is computed; the result is zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(x.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            gradient @ weight if of_x else None,
            gradient.t() @ x if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def linear(
    hidden: torch.Tensor, weight: torch.Tensor, out_size: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _Product.apply(hidden, weight, bias)


def matrix_rows(weight: torch.Tensor, ids: torch.Tensor, depth: int) -> torch.Tensor:
    return F.embedding(ids, weight)


def gather_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, table)


def add_rms_norm(residual: torch.Tensor, hidden: None, *of_norm: Any) -> torch.Tensor:
    return plain.add_rms_norm(residual, None, *of_norm)


def norm_linear(
    residual: torch.Tensor,
    hidden: None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out_size: int,
    bias: torch.Tensor | None,
    weight_offset: float | None,
) -> torch.Tensor:
    return linear(add_rms_norm(residual, None, norm_weight, eps, weight_offset), weight, out_size, bias)


def norm_route(residual: torch.Tensor, hidden: None, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the experts that were chosen, which are the forced ones here."""
    normed, weights, _ = plain.norm_route(residual, None, *rest)
    return normed, weights


def qk_norm_rope_store(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    angles: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    weight_offset: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Also the keys and values [T, Hkv, hd] that are stored."""
    rows = torch.arange(qkv.shape[0], device=qkv.device)
    keys, values = (qkv.new_zeros(qkv.shape[0], *pool.shape[1:]) for pool in (k_pool, v_pool))
    query = plain.qk_norm_rope_store(qkv, weight, angles, keys, values, rows, eps, weight_offset)
    return query, keys, values


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Also the latents [T, 1, R + rd] that are stored."""
    rows = torch.arange(query.shape[0], device=query.device)
    stored = query.new_zeros(query.shape[0], *pool.shape[1:])
    return plain.latent_query_store(query, latent, norm_weight, eps, weight, num_heads, angles, stored, rows), stored


def fused_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    limit: float | None,
    alpha: float,
) -> torch.Tensor:
    form = ExpertForm(w13_bias, w2_bias, limit, alpha)
    return plain.weighted_sum(apply_experts(hidden, ids, w13, w2, _expert_by_expert, form), weights)


def _expert_by_expert(
    hidden_RD: torch.Tensor,
    assigned: Assignments,
    counts: list[int],
    w13_PID: torch.Tensor,
    w2_PDI: torch.Tensor,
    form: ExpertForm,
) -> torch.Tensor:
    """Two matmuls per used expert, which are split from the whole once, so that their gradients are put together once."""
    rows_AD = hidden_RD.index_select(0, assigned.rows_A)
    gate_up = [rows @ w13.t() for rows, w13 in zip(rows_AD.split(counts), w13_PID.unbind()) if rows.shape[0]]
    inner_AI = form.inner(torch.cat(gate_up), assigned.experts_A)
    out = [rows @ w2.t() for rows, w2 in zip(inner_AI.split(counts), w2_PDI.unbind()) if rows.shape[0]]
    out_AD = form.out(torch.cat(out), assigned.experts_A)
    places_A = torch.arange(out_AD.shape[0], device=out_AD.device)
    return out_AD.index_select(0, assigned.unsort(places_A))


def gated_delta(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    query_lens: torch.Tensor,
    rows: torch.Tensor,
    sources: torch.Tensor,
    snapshots: torch.Tensor,
) -> torch.Tensor:
    """Of whole sequences, side by side, token by token; what comes after a sequence's end touches no token of it."""
    heads, key_dim, value_dim = state_pool.shape[1:]
    lengths = query_lens.tolist()
    mixed_TC, z_TV, b_TH, a_TH = projected.split([conv_pool.shape[2], heads * value_dim, heads, heads], dim=-1)
    query, key, value = _heads(_side_by_side(mixed_TC, lengths), conv_weight, heads, key_dim, value_dim)
    beta_NPH = _side_by_side(b_TH.sigmoid(), lengths)
    decay_NPH = _side_by_side((-a_log.exp() * F.softplus(a_TH + dt_bias)).exp(), lengths)
    state_NHkv = query.new_zeros(len(lengths), heads, key_dim, value_dim)
    read = []
    for position in range(max(lengths)):
        query_NHk, key_NHk, value_NHv = query[:, position], key[:, position], value[:, position]
        state_NHkv = state_NHkv * decay_NPH[:, position, :, None, None]
        known_NHv = (state_NHkv * key_NHk.unsqueeze(-1)).sum(2)
        change_NHv = (value_NHv - known_NHv) * beta_NPH[:, position, :, None]
        state_NHkv = state_NHkv + key_NHk.unsqueeze(-1) * change_NHv.unsqueeze(2)
        read.append((state_NHkv * query_NHk.unsqueeze(-1)).sum(2))
    read_NPHv = torch.stack(read, dim=1)
    read_THv = torch.cat([rows_PHv[:length] for rows_PHv, length in zip(read_NPHv, lengths)])
    normed_THv = F.rms_norm(read_THv, (value_dim,), None, eps) * norm_weight
    return (normed_THv * F.silu(z_TV.unflatten(-1, (heads, value_dim)))).flatten(1)


def _side_by_side(rows_T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[N, P, ...], zeros behind the end of a sequence."""
    return pad_sequence(list(rows_T.split(list(lengths))), batch_first=True)


def _heads(
    mixed_NPC: torch.Tensor, conv_weight_wC: torch.Tensor, heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys [N, P, H, dk] and values [N, P, H, dv] as the recurrence takes them."""
    width, channels = conv_weight_wC.shape
    padded_NCP = F.pad(mixed_NPC.transpose(1, 2), (width - 1, 0))
    mixed_NPC = F.silu(F.conv1d(padded_NCP, conv_weight_wC.t().unsqueeze(1), groups=channels)).transpose(1, 2)
    keys = (channels - heads * value_dim) // 2
    query, key, value = mixed_NPC.split([keys, keys, heads * value_dim], dim=-1)
    query, key = (unit(part.unflatten(-1, (-1, key_dim))) for part in (query, key))
    query, key = (part.repeat_interleave(heads * key_dim // keys, dim=2) for part in (query, key))
    return query * key_dim**-0.5, key, value.unflatten(-1, (heads, value_dim))

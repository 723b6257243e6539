"""The operators as formulas that autograd follows: one for each operator of `rollout.kernels.schemas`.

Plain torch of `rollout.kernels.plain` wherever that can be followed; run in float32 on the very inputs that the
operator had, for the gradient alone: results are not used, and a product at the end is not even computed.  `residual`
is the residual stream after the operator's sum, `hidden` then None.

Shapes: as in `schemas`; A = T K pairs of a token and an expert; N sequences, P positions of the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from rollout.kernels import plain
from rollout.kernels.delta_rule import unit
from rollout.kernels.expert_compute import ExpertForm, silu_and_mul
from rollout.kernels.plain import latent_values, sigmoid_gate

__all__ = ["latent_values", "sigmoid_gate", "silu_and_mul"]


class _Product(torch.autograd.Function):
    """x [T, D] @ weight [O, D].T + bias, of which only the gradient is computed; the result is zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(x.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            gradient @ weight if of_x else None,
            gradient.t() @ x if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def linear(hidden: torch.Tensor, weight: torch.Tensor, out_size: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = _Product.apply(hidden, weight, bias)
    return product


def matrix_rows(weight: torch.Tensor, ids: torch.Tensor, depth: int, padding_id: int | None = None) -> torch.Tensor:
    return F.embedding(ids, weight, padding_id)


def gather_rows(table: torch.Tensor, ids: torch.Tensor, padding_id: int | None = None) -> torch.Tensor:
    """Look up rows as an `nn.Embedding` does, which gives the row of its `padding_idx` no gradient."""
    return F.embedding(ids, table, padding_id)


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
    """Return the normed tokens, and the weights of the chosen experts, which are the forced ones here."""
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
    """Return the queries, and the keys and values [T, Hkv, hd] that are stored."""
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
    """Return the queries, and the latents [T, 1, R + rd] that are stored."""
    rows = torch.arange(query.shape[0], device=query.device)
    stored = query.new_zeros(query.shape[0], *pool.shape[1:])
    return plain.latent_query_store(query, latent, norm_weight, eps, weight, num_heads, angles, stored, rows), stored


class _GroupedProduct(torch.autograd.Function):
    """The product of rows of x [A, D], in expert order, `counts[p]` of expert p, and weight[p] [O, D].T: [A, O]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(x.shape[0], weight.shape[1])
        for expert, rows in _spans(counts):
            torch.mm(x[rows], weight[expert].t(), out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        for expert, rows in _spans(ctx.counts):
            torch.mm(gradient[rows], weight[expert], out=of_x[rows])
            torch.mm(gradient[rows].t(), x[rows], out=of_weight[expert])
        return of_x, of_weight, None


class _Combination(torch.autograd.Function):
    """The sum over a token's experts of weight_A (inner_AI @ w2[p].T + bias[p]); the result [T, D] is zeros.

    Rows of A lie as in `_GroupedProduct`, and belong to the tokens `rows_A`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inner_AI: torch.Tensor,
        weight_A: torch.Tensor,
        w2_PDI: torch.Tensor,
        bias_PD: torch.Tensor | None,
        rows_A: torch.Tensor,
        counts: list[int],
        num_tokens: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(inner_AI, weight_A, w2_PDI, bias_PD, rows_A)
        ctx.counts = counts
        return inner_AI.new_zeros(()).expand(num_tokens, w2_PDI.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inner_AI, weight_A, w2_PDI, bias_PD, rows_A = ctx.saved_tensors
        gradient_AD = gradient.index_select(0, rows_A)
        of_inner, of_w2 = torch.empty_like(inner_AI), torch.zeros_like(w2_PDI)
        of_weight = torch.empty_like(weight_A)
        of_bias = None if bias_PD is None else torch.zeros_like(bias_PD)
        for expert, rows in _spans(ctx.counts):
            torch.mm(gradient_AD[rows], w2_PDI[expert], out=of_inner[rows])
            of_weight[rows] = (of_inner[rows] * inner_AI[rows]).sum(1)
            if bias_PD is not None:
                of_weight[rows] += gradient_AD[rows] @ bias_PD[expert]
            weighted = gradient_AD[rows] * weight_A[rows, None]
            torch.mm(weighted.t(), inner_AI[rows], out=of_w2[expert])
            if of_bias is not None:
                of_bias[expert] = weighted.sum(0)
        return of_inner.mul_(weight_A[:, None]), of_weight, of_w2, of_bias, None, None, None


def _spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, with its rows."""
    end = 0
    for expert, count in enumerate(counts):
        start, end = end, end + count
        if count:
            yield expert, slice(start, end)


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
    order_A = ids.flatten().argsort(stable=True)
    rows_A, experts_A = order_A // ids.shape[1], ids.flatten().index_select(0, order_A)
    counts = torch.bincount(experts_A, minlength=w13.shape[0]).tolist()
    gate_up = _GroupedProduct.apply(hidden.index_select(0, rows_A), w13, counts)
    inner_AI = ExpertForm(w13_bias, w2_bias, limit, alpha).inner(gate_up, experts_A)
    weight_A = weights.flatten().index_select(0, order_A)
    combined: torch.Tensor = _Combination.apply(inner_AI, weight_A, w2, w2_bias, rows_A, counts, hidden.shape[0])
    return combined


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
    """Run whole sequences side by side, token by token; padding after a sequence's end touches no token of it."""
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

"""Shapes and dtypes of the operators' results without computing them, for tracing.  Knows nothing else of them.

Shapes: T tokens, D hidden, I intermediate, O output features, E logical experts, P physical experts, K top-k,
H query heads, Hkv key/value heads, hd head size, S slots of the KV pool, N rows to sample, V vocabulary.
"""

from __future__ import annotations

import torch


def register_fakes() -> None:
    """Call once, after the operators are loaded."""
    for name, function in (
        ("pack_rows", _pack_rows),
        ("unpack_rows", _unpack_rows),
        ("packed_embedding", _packed_embedding),
        ("gather_rows", _gather_rows),
        ("block_sums", _block_sums),
        ("linear", _linear),
        ("norm_linear", _norm_linear),
        ("norm_route", _norm_route),
        ("add_rms_norm", _add_rms_norm),
        ("qk_norm_rope_store", _qk_norm_rope_store),
        ("silu_and_mul", _silu_and_mul),
        ("fused_experts", _fused_experts),
        ("paged_attention", _paged_attention),
        ("sample_rows", _sample_rows),
        ("score_rows", _score_rows),
    ):
        torch.library.register_fake(f"lockstep::{name}", function)


def _pack_rows(packed: torch.Tensor, source: torch.Tensor, first_row: int, step: int, offset: int) -> None:
    return None


def _unpack_rows(
    packed: torch.Tensor, depth: int, first_row: int, num_rows: int, step: int, offset: int
) -> torch.Tensor:
    return packed.new_empty(num_rows, depth)


def _packed_embedding(packed: torch.Tensor, ids: torch.Tensor, depth: int) -> torch.Tensor:
    return packed.new_empty(ids.shape[0], depth)


def _block_sums(words: torch.Tensor, multipliers: torch.Tensor, mask: int) -> tuple[torch.Tensor, torch.Tensor]:
    return multipliers.new_empty(words.shape[0]), multipliers.new_empty(words.shape[0], dtype=torch.bool)


def _gather_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table.new_empty(ids.shape[0], *table.shape[1:])


def _linear(hidden_TD: torch.Tensor, weight: torch.Tensor, out_size: int) -> torch.Tensor:
    return hidden_TD.new_empty(hidden_TD.shape[0], out_size)


def _add_rms_norm(
    residual_TD: torch.Tensor, hidden_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    return residual_TD.new_empty(residual_TD.shape)


def _norm_linear(
    residual_TD: torch.Tensor,
    hidden_TD: torch.Tensor | None,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out_size: int,
) -> torch.Tensor:
    return residual_TD.new_empty(residual_TD.shape[0], out_size)


def _norm_route(
    residual_TD: torch.Tensor,
    hidden_TD: torch.Tensor | None,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    num_experts: int,
    k: int,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (residual_TD.shape[0], k)
    ids_TK = residual_TD.new_empty(shape, dtype=torch.int64)
    return residual_TD.new_empty(residual_TD.shape), residual_TD.new_empty(shape), ids_TK


def _qk_norm_rope_store(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    angles: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots_T: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    num_heads = weight.shape[0] - k_pool.shape[1]
    return qkv.new_empty(slots_T.shape[0], num_heads, k_pool.shape[2])


def _silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    return gate_up_T2I.new_empty(gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2)


def _fused_experts(
    hidden_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    inner_size: int,
) -> torch.Tensor:
    if weights_TK is not None:
        return hidden_TD.new_empty(hidden_TD.shape)
    return hidden_TD.new_empty(*ids_TK.shape, hidden_TD.shape[1])


def _paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    query_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return q.new_empty(q.shape)


def _sample_rows(
    logits_NV: torch.Tensor,
    positions_N: torch.Tensor,
    settings: torch.Tensor,
    chosen_ids: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    end_ids: torch.Tensor,
    histories: torch.Tensor,
    top_n: int,
) -> tuple[torch.Tensor, ...]:
    num_rows = logits_NV.shape[0]
    return (
        positions_N.new_empty(num_rows),
        logits_NV.new_empty(num_rows, dtype=torch.float32),
        positions_N.new_empty(num_rows, top_n),
        logits_NV.new_empty(num_rows, top_n, dtype=torch.float32),
        logits_NV.new_empty(chosen_ids.shape[0], dtype=torch.float32),
    )


def _score_rows(
    logits_NV: torch.Tensor, target_ids_N: torch.Tensor, temperature: float, chosen_ids: torch.Tensor, top_n: int
) -> tuple[torch.Tensor, ...]:
    num_rows = logits_NV.shape[0]
    return (
        logits_NV.new_empty(num_rows, dtype=torch.float32),
        target_ids_N.new_empty(num_rows, top_n),
        logits_NV.new_empty(num_rows, top_n, dtype=torch.float32),
        logits_NV.new_empty(num_rows, chosen_ids.shape[0], dtype=torch.float32),
    )

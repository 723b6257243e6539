"""Shapes and dtypes of the operators' results without computing them, for tracing.  Knows nothing else of them.

Shapes: T tokens, D hidden, O output features, E logical experts, P physical experts, K top-k, H query heads,
Hkv key/value heads, hd head size, S slots of the KV pool.
"""

from __future__ import annotations

import torch


def register_fakes() -> None:
    """Call once, after the operators are loaded."""
    for name, function in (
        ("linear", _linear),
        ("rms_norm", _rms_norm),
        ("add_rms_norm", _add_rms_norm),
        ("qk_norm_rope_store", _qk_norm_rope_store),
        ("topk_softmax", _topk_softmax),
        ("fused_experts", _fused_experts),
        ("paged_attention", _paged_attention),
    ):
        torch.library.register_fake(f"lockstep::{name}", function)


def _linear(hidden_TD: torch.Tensor, weight_OD: torch.Tensor) -> torch.Tensor:
    return hidden_TD.new_empty(hidden_TD.shape[0], weight_OD.shape[0])


def _rms_norm(hidden_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    return hidden_TD.new_empty(hidden_TD.shape)


def _add_rms_norm(
    hidden_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    return hidden_TD.new_empty(hidden_TD.shape)


def _qk_norm_rope_store(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots_T: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    num_heads = weight.shape[0] - k_pool.shape[1]
    return qkv.new_empty(slots_T.shape[0], num_heads, k_pool.shape[2])


def _topk_softmax(logits_TE: torch.Tensor, k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits_TE.shape[0], k)
    return logits_TE.new_empty(shape), logits_TE.new_empty(shape, dtype=torch.int64)


def _fused_experts(
    hidden_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
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

"""The gated delta rule in plain torch: every device and every float dtype.

Token by token: what a token gives does not depend on where a step, a chunk or a cached prefix begins.  Rounding as in
transformers `models/qwen3_next`: the convolution, its silu and the sigmoid of beta to the model's dtype, and so what is
read from the state before its norm; everything between is float32, or float64 for float64.

Shapes: T tokens, t of one sequence, N sequences, M snapshots, R rows of the pools, Hk key heads, H value heads, dk and
dv sizes of a head's keys and values, C = 2 Hk dk + H dv channels of the convolution over w tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_L2_EPS = 1e-6


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
    num_heads, key_dim, value_dim = state_pool.shape[1:]
    sizes = [conv_pool.shape[2], num_heads * value_dim, num_heads, num_heads]
    mixed_TC, z_TV, b_TH, a_TH = projected.split(sizes, dim=-1)
    work = torch.promote_types(projected.dtype, torch.float32)
    beta_TH = b_TH.sigmoid().to(work)
    decay_TH = (-a_log.to(work).exp() * F.softplus(a_TH.to(work) + dt_bias.to(work))).exp()
    read_THv = projected.new_empty(projected.shape[0], num_heads, value_dim)
    pools, copies = (state_pool, conv_pool), snapshots.tolist()
    first = 0
    for n, (length, row, source) in enumerate(zip(query_lens.tolist(), rows.tolist(), sources.tolist(), strict=True)):
        here = slice(first, first + length)
        first += length
        state_Hkv, before_wC = (pool[source] if source >= 0 else torch.zeros_like(pool[0]) for pool in pools)
        inputs_tC = torch.cat((before_wC, mixed_TC[here]))
        query_key_value = _heads(_convolved(inputs_tC, conv_weight, work), num_heads, key_dim, value_dim, work)
        steps = zip(*query_key_value, beta_TH[here], decay_TH[here], strict=True)
        state_Hkv = state_Hkv.to(work)
        for done, (query_Hk, key_Hk, value_Hv, beta_H, decay_H) in enumerate(steps, start=1):
            state_Hkv = state_Hkv * decay_H[:, None, None]
            known_Hv = (state_Hkv * key_Hk.unsqueeze(-1)).sum(1)
            state_Hkv += key_Hk.unsqueeze(-1) * ((value_Hv - known_Hv) * beta_H[:, None]).unsqueeze(1)
            read_THv[here][done - 1] = (state_Hkv * query_Hk.unsqueeze(-1)).sum(1)
            for to in [to for of, after, to in copies if (of, after) == (n, done)] + [row] * (done == length):
                state_pool[to] = state_Hkv
                conv_pool[to] = inputs_tC[done : done + before_wC.shape[0]]
    gate_THv = F.silu(z_TV.unflatten(-1, (num_heads, value_dim)).to(work))
    normed_THv = F.rms_norm(read_THv, (value_dim,), None, eps) * norm_weight
    return (normed_THv * gate_THv).to(projected.dtype).flatten(1)


def _convolved(inputs_tC: torch.Tensor, weight_wC: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    """silu of the convolution [t, C] of t + w - 1 inputs."""
    windows_tCw = inputs_tC.to(work).unfold(0, weight_wC.shape[0], 1)
    return F.silu((windows_tCw * weight_wC.to(work).t()).sum(-1).to(inputs_tC.dtype))


def _heads(
    mixed_tC: torch.Tensor, num_heads: int, key_dim: int, value_dim: int, work: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys of length one [t, H, dk], queries also over the root of dk, and values [t, H, dv]."""
    keys = (mixed_tC.shape[1] - num_heads * value_dim) // 2
    query, key, value = mixed_tC.to(work).split([keys, keys, num_heads * value_dim], dim=-1)
    query, key = (unit(part.unflatten(-1, (-1, key_dim))) for part in (query, key))
    query, key = (part.repeat_interleave(num_heads * key_dim // keys, dim=1) for part in (query, key))
    return query * key_dim**-0.5, key, value.unflatten(-1, (num_heads, value_dim))


def unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _L2_EPS)

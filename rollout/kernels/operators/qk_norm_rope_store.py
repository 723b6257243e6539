"""`qk_norm_rope_store`: queries and keys of qkv [T, (H + 2 Hkv) hd] normed by head where there is a weight
[H + Hkv, hd], and rotated by angles [T, 2, rd]; keys and values stored in their slots [T] of the pools [S, Hkv, hd].

Pools may be float8_e4m3fn: they hold keys over `k_scale` and values over `v_scale`.  The quotient is rounded to
float32, then to FP8; beyond 448 it becomes 448, and NaN stays NaN.  Pools of another dtype have scales of 1.

Returns the queries [T, H, hd].  Gradients reach the stored rows, not the earlier content of the pools.
"""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator
from rollout.kernels.operators.add_rms_norm import rms_norm


@operator(
    "(Tensor qkv, Tensor? weight, Tensor angles, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slots, float eps, "
    "float? weight_offset=None, float k_scale=1.0, float v_scale=1.0) -> Tensor",
    Gradient(flows=("qkv",), weights=("weight",), pools=("k_pool", "v_pool"), stored=("k_pool", "v_pool")),
)
def qk_norm_rope_store(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    angles: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    weight_offset: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    num_kv_heads, head_dim = k_pool.shape[1:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query_key, value = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if weight is not None:
        query_key = rms_norm(query_key, weight, eps, weight_offset)
    query, key = rotate(query_key, angles).split([num_heads, num_kv_heads], dim=1)
    store_rows(k_pool, slots, key, k_scale)
    store_rows(v_pool, slots, value, v_scale)
    return query.contiguous()


FP8_MAX = 448.0
"""The largest number of float8_e4m3fn, which has no infinity."""


def store_rows(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float = 1.0) -> None:
    """Write rows [T, ...] of any float dtype at `slots` [T] of a pool of the same dtype, or over `scale` in FP8."""
    if pool.dtype == torch.float8_e4m3fn:
        if scale != 1.0:
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            rows = rows / rows.new_full((), scale)  # by a number CUDA divides through its reciprocal
        # Releases of torch differ in what they make of too large numbers, and `index_copy_` takes no FP8.
        pool, rows = pool.view(torch.uint8), rows.clamp(-FP8_MAX, FP8_MAX).to(pool.dtype).view(torch.uint8)
    pool.index_copy_(0, slots, rows)


def pool_rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows at `slots` [n] of a pool, in its dtype."""
    if pool.dtype == torch.float8_e4m3fn:
        return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype)
    return pool.index_select(0, slots)


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the first rd elements of each head of [T, heads, hd] by angles [T, 2, rd] of cos and sign-folded sin.

    Rolling these elements by rd / 2 and folding the sign into sin equals rotate-half, bit for bit.
    """
    rotary_dim = angles.shape[-1]
    cos, signed_sin = angles.unsqueeze(2).unbind(1)
    turned, kept = heads[..., :rotary_dim], heads[..., rotary_dim:]
    turned = turned.roll(rotary_dim // 2, -1).mul_(signed_sin).add_(turned * cos)
    return turned if kept.shape[-1] == 0 else torch.cat((turned, kept), -1)

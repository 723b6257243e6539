"""`qk_norm_rope_store`: from the attention's projections to queries and to the KV pools.

One Triton program takes some heads of one token: it norms queries and keys by head, rotates their first elements, and
stores keys and values in the token's slot.  It rounds as plain torch does: the norm as in `add_rms_norm`, both products
of the rotation and their sum one by one.  Pools in FP8 take the rounded keys and values over their scales, rounded once
more, with numbers beyond 448 as 448.  A token's bits depend on that token alone.

Shapes: T tokens, H query heads, Hkv key/value heads, hd head size, rd rotated elements of it, S slots of the KV pool.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_rms_norm import normed, rounded
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_HEADS = 4  # heads of a program, which is one warp


@triton.jit
def qk_norm_rope_store_kernel(
    qkv,
    weight,
    angles,
    k_pool,
    v_pool,
    slots,
    out,
    qkv_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    eps,
    weight_offset,
    k_scale,
    v_scale,
    H: tl.constexpr,
    HKV: tl.constexpr,
    HD: tl.constexpr,
    RD: tl.constexpr,
    NORMS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    wait_for_predecessor()
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK_D)[None, :]
    turned = H + HKV  # heads before the values
    inside = (head < turned + HKV) & (at < HD)
    query_or_key = (head < turned) & (at < HD)
    source = qkv + token * qkv_stride + head * HD
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    # Each of the first rd elements turns with a partner that is rd / 2 places away.
    half = RD // 2
    partner_at = tl.where(at < half, at + half, at - half)
    rotates = query_or_key & (at < RD)
    partner = tl.load(source + partner_at, mask=rotates, other=0.0).to(tl.float32)
    value = x
    if NORMS:
        squares = tl.sum(x * x, 1)[:, None]
        row = weight + head * HD
        w = tl.load(row + at, mask=query_or_key, other=0.0).to(tl.float32)
        x = normed(x, squares, HD, eps, w, weight_offset, HAS_OFFSET, dtype)
        w = tl.load(row + partner_at, mask=rotates, other=0.0).to(tl.float32)
        partner = normed(partner, squares, HD, eps, w, weight_offset, HAS_OFFSET, dtype)
    angle = angles + token * 2 * RD + at
    cos = tl.load(angle, mask=at < RD, other=0.0).to(tl.float32)
    sin = tl.load(angle + RD, mask=at < RD, other=0.0).to(tl.float32)
    x = tl.where(rotates, rounded(partner * sin, dtype) + rounded(x * cos, dtype), x).to(dtype)
    tl.store(out + (token * H + head) * HD + at, x, mask=query_or_key & (head < H))
    slot = tl.load(slots + token)
    key_place = k_pool + slot * k_slot_stride + (head - H) * k_head_stride + at
    tl.store(key_place, as_stored(x, k_scale, k_pool), mask=query_or_key & (head >= H))
    value_place = v_pool + slot * v_slot_stride + (head - turned) * v_head_stride + at
    tl.store(value_place, as_stored(value.to(dtype), v_scale, v_pool), mask=inside & (head >= turned))


@triton.jit
def as_stored(x, scale, pool):
    """Return x as the pool holds it.  `scale`: of FP8; other pools have none."""
    if pool.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pool.dtype.element_ty)


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
    """Normalise and rotate queries and keys, and store keys and values in the pools' `slots`; return the queries.

    Slots and heads of the pools and rows of `qkv` may lie apart from one another, elements of a head may not.  Slots
    are not checked: a step's slots come from the allocator.
    """
    num_tokens, (num_kv_heads, head_dim), rotary_dim = qkv.shape[0], k_pool.shape[1:], angles.shape[2]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    assert v_pool.shape == k_pool.shape and rotary_dim % 2 == 0 and rotary_dim <= head_dim
    assert qkv.stride(1) == k_pool.stride(2) == v_pool.stride(2) == 1 and angles.is_contiguous()
    if num_tokens == 0:
        return out
    grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS))
    qk_norm_rope_store_kernel[grid](
        qkv,
        qkv if weight is None else weight,
        angles,
        k_pool,
        v_pool,
        slots,
        out,
        qkv.stride(0),
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        eps,
        weight_offset or 0.0,
        k_scale,
        v_scale,
        H=num_heads,
        HKV=num_kv_heads,
        HD=head_dim,
        RD=rotary_dim,
        NORMS=weight is not None,
        HAS_OFFSET=weight_offset is not None,
        HEADS=_HEADS,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
        enable_fp_fusion=False,
        **launch_options(qkv),
    )
    return out


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for heads of 128 with and without a norm, of 256 with an offset, and with pools in FP8."""
    signature = dict.fromkeys(("qkv", "weight", "angles", "k_pool", "v_pool"), "*bf16")
    signature |= {"slots": "*i64", "out": "*bf16"}
    strides = ("qkv_stride", "k_slot_stride", "k_head_stride", "v_slot_stride", "v_head_stride")
    signature |= dict.fromkeys(strides, "i32") | dict.fromkeys(("eps", "weight_offset", "k_scale", "v_scale"), "fp32")
    return [
        (
            f"qk_norm_rope_store hd={size}{' norm' if norms else ''}{' offset' if offset else ''}{pools}",
            qk_norm_rope_store_kernel,
            signature | (dict.fromkeys(("k_pool", "v_pool"), "*fp8e4nv") if pools else {}),
            dict[str, object](H=32, HKV=4, HD=size, RD=rotated, NORMS=norms, HAS_OFFSET=offset)
            | {"HEADS": _HEADS, "BLOCK_D": size},
            1,
            3,
        )
        for size, rotated, norms, offset, pools in (
            (128, 128, True, False, ""),
            (128, 128, False, False, ""),
            (256, 64, True, True, ""),
            (128, 128, True, False, " fp8"),
        )
    ]

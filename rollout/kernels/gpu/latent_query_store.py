"""`latent_query_store` for CUDA: two launches, the products by head (`latent_heads`) and all the rest.

Without a matrix the first launch is a copy.

One program of the rest norms and rotates the latent of a token, and stores it.  The others rotate the last elements of
some of its query heads.  It rounds as plain torch does.  A token's bits depend on that token alone.

Shapes: T tokens, H heads, R rank of latents, rd rotated elements, nope elements of a query that are not, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_rms_norm import normed, rounded
from rollout.kernels.gpu.latent_heads import head_products
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_HEADS = 16  # of a program
_WARPS = 4


@triton.jit
def turned(row, at, inside, angles, RD: tl.constexpr, dtype: tl.constexpr):
    """Return the elements `at` of `row` rotated: elements 2 i and 2 i + 1 turn together."""
    x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(row + (at ^ 1), mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(angles + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(angles + RD + at, mask=inside, other=0.0).to(tl.float32)
    return (rounded(partner * sin, dtype) + rounded(x * cos, dtype)).to(dtype)


@triton.jit
def latent_query_store_kernel(
    query,
    latent,
    norm_weight,
    angles,
    pool,
    slots,
    out,
    query_stride,
    latent_stride,
    slot_stride,
    eps,
    H: tl.constexpr,
    R: tl.constexpr,
    RD: tl.constexpr,
    NOPE: tl.constexpr,
    FIRST: tl.constexpr,  # elements of a result before the rotated ones
    HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_RD: tl.constexpr,
):
    wait_for_predecessor()
    dtype: tl.constexpr = out.dtype.element_ty
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own_angles = angles + token * 2 * RD
    # Each name has one shape, whichever branch is taken.
    if part == 0:
        at, row = tl.arange(0, BLOCK_R), latent + token * latent_stride
        place = pool + tl.load(slots + token) * slot_stride
        x = tl.load(row + at, mask=at < R, other=0.0).to(tl.float32)
        w = tl.load(norm_weight + at, mask=at < R, other=0.0).to(tl.float32)
        x = normed(x, tl.sum(x * x, 0), R, eps, w, 0.0, False, dtype)
        tl.store(place + at, x.to(dtype), mask=at < R)
        last = tl.arange(0, BLOCK_RD)
        key = turned(row + R, last, last < RD, own_angles, RD, dtype)
        tl.store(place + R + last, key, mask=last < RD)
    else:
        head, column = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_RD)[None, :]
        inside = (head < H) & (column < RD)
        rows = query + token * query_stride + head * (NOPE + RD) + NOPE
        part_of_query = turned(rows, column, inside, own_angles, RD, dtype)
        tl.store(out + (token * H + head) * (FIRST + RD) + FIRST + column, part_of_query, mask=inside)


def latent_query_store(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None,
    num_heads: int,
    angles: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return the queries [T, H, R + rd] that meet latents, and store the latents in the pool's `slots`.

    Without `weight` queries are [T, H, nope + rd].  Rows of `query` and `latent` may lie apart.  Slots are not checked:
    a step's slots come from the allocator.
    """
    num_tokens, rotary_dim, rank = query.shape[0], angles.shape[2], norm_weight.shape[0]
    plain_size = query.shape[1] // num_heads - rotary_dim
    first_size = plain_size if weight is None else rank
    out = torch.empty((num_tokens, num_heads, first_size + rotary_dim), dtype=query.dtype, device=query.device)
    assert query.stride(1) == latent.stride(1) == pool.stride(2) == 1 and angles.is_contiguous()
    if num_tokens == 0:
        return out
    heads_THd = query.unflatten(1, (num_heads, plain_size + rotary_dim))
    if weight is None:
        out[..., :plain_size].copy_(heads_THd[..., :plain_size])
    else:
        weight_HNR = weight.view(num_heads, -1, rank)[:, :plain_size]
        head_products(heads_THd[..., :plain_size], weight_HNR, out[..., :rank])
    latent_query_store_kernel[(num_tokens, 1 + triton.cdiv(num_heads, _HEADS))](
        query,
        latent,
        norm_weight,
        angles,
        pool,
        slots,
        out,
        query.stride(0),
        latent.stride(0),
        pool.stride(0),
        eps,
        H=num_heads,
        R=rank,
        RD=rotary_dim,
        NOPE=plain_size,
        FIRST=first_size,
        HEADS=_HEADS,
        BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_RD=triton.next_power_of_2(rotary_dim),
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **launch_options(query),
    )
    return out


def compile_cases() -> list[tuple[Any, ...]]:
    """Return the case of DeepSeek-V3: 128 heads of 128 and 64, latents of 512 and 64."""
    signature = dict.fromkeys(("query", "latent", "norm_weight", "angles", "pool", "out"), "*bf16")
    signature |= {"slots": "*i64", "eps": "fp32"}
    signature |= dict.fromkeys(("query_stride", "latent_stride", "slot_stride"), "i32")
    sizes: dict[str, object] = {"H": 128, "R": 512, "RD": 64, "NOPE": 128, "FIRST": 512, "HEADS": _HEADS}
    sizes |= {"BLOCK_R": 512, "BLOCK_RD": 64}
    return [("latent_query_store R=512", latent_query_store_kernel, signature, sizes, _WARPS, 3)]

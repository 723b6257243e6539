"""Products of each head's rows with that head's matrix, for latent attention, as a Triton kernel.

A program takes some tokens and some columns of one head.  Tiles and the order of sums are the same for every number of
tokens, so that a row's bits do not depend on the batch.

Shapes: T tokens, H heads, K summed elements, O columns of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_TOKENS, _COLUMNS, _DEPTH = 64, 64, 64  # of a tile
_WARPS, _STAGES = 8, 3


@triton.jit(do_not_specialize=["num_tokens"])
def head_products_kernel(
    x,
    weight,
    out,
    num_tokens,
    x_token,
    x_head,
    w_head,
    w_depth,
    w_column,
    out_token,
    out_head,
    K: tl.constexpr,
    O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Where a tile begins is counted in 64 bits, places in it in 32, which take fewer registers.
    wait_for_predecessor()
    head, first_token = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK_T
    x += first_token * x_token + head * x_head
    weight += head * w_head
    out += first_token * out_token + head * out_head
    token = tl.arange(0, BLOCK_T)[:, None]
    column = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
    is_token = token < num_tokens - first_token
    total = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        rows = tl.load(x + token * x_token + k[None, :], mask=is_token & (k < K)[None, :], other=0.0)
        places = weight + k[:, None] * w_depth + column * w_column
        matrix = tl.load(places, mask=(k < K)[:, None] & (column < O), other=0.0)
        total = tl.dot(rows, matrix, total, input_precision="ieee")
    tl.store(out + token * out_token + column, total.to(out.dtype.element_ty), mask=is_token & (column < O))


def head_products(x_THK: torch.Tensor, weight_HKO: torch.Tensor, out_THO: torch.Tensor) -> None:
    """Write the product of x [T, H, K] with weight [H, K, O] into out [T, H, O].

    The weight may have any strides; elements of x and of the result are next to each other.
    """
    (num_tokens, heads, depth), columns = x_THK.shape, weight_HKO.shape[2]
    assert x_THK.stride(2) == out_THO.stride(2) == 1 and weight_HKO.shape[:2] == (heads, depth)
    if num_tokens == 0:
        return
    grid = (triton.cdiv(num_tokens, _TOKENS), heads, triton.cdiv(columns, _COLUMNS))
    head_products_kernel[grid](
        x_THK,
        weight_HKO,
        out_THO,
        num_tokens,
        *x_THK.stride()[:2],
        *weight_HKO.stride(),
        *out_THO.stride()[:2],
        K=depth,
        O=columns,
        BLOCK_T=_TOKENS,
        BLOCK_O=_COLUMNS,
        BLOCK_K=_DEPTH,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
        **launch_options(x_THK),
    )


def compile_cases() -> list[tuple[Any, ...]]:
    """Return the products of DeepSeek-V3: of 128 with 512 for queries, of 512 with 128 for values."""
    signature = dict.fromkeys(("x", "weight", "out"), "*bf16")
    numbers = ("num_tokens", "x_token", "x_head", "w_head", "w_depth", "w_column", "out_token", "out_head")
    signature |= dict.fromkeys(numbers, "i32")
    tile: dict[str, object] = {"BLOCK_T": _TOKENS, "BLOCK_O": _COLUMNS, "BLOCK_K": _DEPTH}
    sizes = [{"K": depth, "O": columns} | tile for depth, columns in ((128, 512), (512, 128))]
    return [(f"latent heads {x['K']} x {x['O']}", head_products_kernel, signature, x, _WARPS, _STAGES) for x in sizes]

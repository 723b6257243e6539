"""`linear` for CUDA: torch's product, and a Triton kernel for matrices in a form of `row_places`.

A weight becomes its value in the dtype of the activations, in registers (W8A16, W4A16).  Activations are not quantised:
so a product has the error of one of these values in that dtype, and the same as an engine on a CPU that holds them.
A row's result is the same in every batch, as in `experts_kernels`: an element is one sum over the depth, in ascending
steps, whatever the tiles.

Shapes: T tokens, D input features, O output features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rollout.kernels.gpu.experts_kernels import row_sums
from rollout.kernels.gpu.experts_plan import Tiles
from rollout.kernels.gpu.fused_experts import HELD_WEIGHTS, product_constants, scales_of
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor
from rollout.kernels.row_places import PACKED_INT4, row_bytes
from weight_sync.fp8_blocks import QUANTISED

# Pairs of a largest T and its tiles, ascending.
LINEAR_TILES: tuple[tuple[float, Tiles], ...] = (
    (16, Tiles(tokens=16, rows=64, num_warps=4, num_stages=5)),
    (32, Tiles(tokens=32, rows=64, num_warps=4, num_stages=4)),
    (256, Tiles(tokens=64, rows=128, num_warps=4, num_stages=3)),
    (math.inf, Tiles(tokens=128, rows=128, num_warps=8, num_stages=3)),
)


_COMPILED = (("fp8e4nv", QUANTISED, "fp8e4nv", "*fp32"), ("int4", PACKED_INT4, "u8", "*i16"))


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    D: tl.constexpr,
    O: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute out [T, O] of x [T, D] and w [O, .], with one program for each tile; programs of the same rows in turn.

    FORM, STRIDE, SCALES_AT: see `row_sums`.
    """
    wait_for_predecessor()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    blocks = tl.cdiv(num_tokens, BLOCK_M)
    begin = tl.program_id(0) // blocks * ROWS
    token = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = begin + tl.arange(0, ROWS)
    # Beyond the edges the last row and the last token are computed once more, and not stored.
    sums = row_sums(
        w_ptr,
        scale_ptr,
        begin.to(tl.int64),
        tl.minimum(feature, O - 1) - begin,
        x_ptr,
        tl.minimum(token, num_tokens - 1).to(tl.int64),
        D,
        FORM,
        STRIDE,
        SCALES_AT,
        BLOCK_M,
        ROWS,
        BLOCK_K,
    )
    if HAS_BIAS:
        sums += tl.load(bias_ptr + tl.minimum(feature, O - 1)).to(tl.float32)[:, None]
    stored = (feature < O)[:, None] & (token < num_tokens)[None, :]
    tl.store(out_ptr + token.to(tl.int64)[None, :] * O + feature[:, None], sums.to(dtype), mask=stored)


def linear(hidden: torch.Tensor, weight: torch.Tensor, out_size: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `hidden @ weight.T + bias` [T, O], rounded once.

    `weight` [O, D], or rows of `row_places` [O, S].  Of plain weights a row's bits may depend on the number of rows.
    """
    if weight.dtype not in HELD_WEIGHTS:
        return F.linear(hidden, weight, bias)
    assert weight.is_contiguous() and weight.shape[0] == out_size, weight.shape
    hidden = hidden.contiguous()
    num_tokens, depth = hidden.shape
    out_TO = hidden.new_empty(num_tokens, out_size)
    if num_tokens == 0:
        return out_TO
    tiles = next(chosen for most, chosen in LINEAR_TILES if num_tokens <= most)
    linear_kernel[(triton.cdiv(out_size, tiles.rows) * triton.cdiv(num_tokens, tiles.tokens),)](
        hidden,
        weight,
        scales_of(weight),
        bias,
        out_TO,
        num_tokens,
        D=depth,
        O=out_size,
        HAS_BIAS=bias is not None,
        **product_constants(tiles, weight.dtype, depth, weight.shape[-1]),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
        **launch_options(hidden),
    )
    return out_TO


def compile_cases() -> list[tuple[Any, ...]]:
    """Return the cases of both forms with each choice of tiles: queries, keys and values of Qwen3-30B-A3B."""
    found: list[tuple[Any, ...]] = []
    depth, out_size = 2048, 5120
    for name_of, dtype, kind, scale in _COMPILED:
        stride = row_bytes(*HELD_WEIGHTS[dtype].parts(depth))
        for _, tiles in LINEAR_TILES:
            types = {"x_ptr": "*bf16", "w_ptr": f"*{kind}", "scale_ptr": scale, "out_ptr": "*bf16", "num_tokens": "i32"}
            constants: dict[str, object] = {"D": depth, "O": out_size, "HAS_BIAS": False, "bias_ptr": None}
            constants |= product_constants(tiles, dtype, depth, stride)
            name = f"linear, {name_of}, {tiles.rows} x {tiles.tokens}"
            found.append((name, linear_kernel, types, constants, tiles.num_warps, tiles.num_stages))
    return found

"""`linear` and `norm_linear` for CUDA whose rows have the same bits in every batch: `--enable-deterministic-inference`.

A library's matrix product takes other tiles, and other splits of the depth, for another number of rows.  Here a program
multiplies some weight rows with some tokens, weights on the left, BLOCK_K after BLOCK_K of the whole depth.  The tile
depends on the dtype and the number of weight rows alone.  So an element is one sum in one order for every batch.

Shapes: T tokens, D input features, O output features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_rms_norm import add_rms_norm
from rollout.kernels.gpu.fused_experts import HELD_WEIGHTS
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.linear import linear as held_linear
from rollout.kernels.gpu.predecessor import wait_for_predecessor


class Tile(NamedTuple):
    """A tile is `rows` of the weight times `tokens`; `depth`: features that are multiplied at once."""

    rows: int
    tokens: int
    depth: int
    num_warps: int
    num_stages: int


_WIDE, _NARROW = Tile(128, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4)
_FLOAT32 = Tile(64, 16, 32, 4, 3)
_MANY_ROWS = 128 * 128  # from here on wide tiles give every multiprocessor work


def choose_tile(out_features: int, dtype: torch.dtype) -> Tile:
    """Choose the tile of a product: the same for every number of tokens."""
    if dtype == torch.float32:
        return _FLOAT32
    return _WIDE if out_features >= _MANY_ROWS else _NARROW


@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    hidden,
    weight,
    bias,
    out,
    num_tokens,
    D: tl.constexpr,
    O: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_predecessor()
    feature = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(0, D, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        w_mask = (feature < O)[:, None] & (at < D)[None, :]
        x_mask = (token < num_tokens)[None, :] & (at < D)[:, None]
        w = tl.load(weight + feature[:, None] * D + at[None, :], mask=w_mask, other=0.0)
        x = tl.load(hidden + token[None, :] * D + at[:, None], mask=x_mask, other=0.0)
        sums = tl.dot(w, x, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + feature, mask=feature < O, other=0.0).to(tl.float32)[:, None]
    inside = (feature < O)[:, None] & (token < num_tokens)[None, :]
    tl.store(out + token[None, :] * O + feature[:, None], sums.to(out.dtype.element_ty), mask=inside)


def linear(hidden: torch.Tensor, weight: torch.Tensor, out_size: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return hidden [T, D] @ weight [O, D].T + bias [T, O], summed in float32 and rounded once.

    Of weights in a form of `row_places`, `gpu.linear` gives a row the same bits in every batch already.
    """
    if weight.dtype in HELD_WEIGHTS:
        return held_linear(hidden, weight, out_size, bias)
    (num_tokens, depth), out_features = hidden.shape, weight.shape[0]
    assert out_features == out_size and weight.is_contiguous(), "a row-major matrix"
    out_TO = torch.empty((num_tokens, out_features), dtype=hidden.dtype, device=hidden.device)
    if num_tokens == 0:
        return out_TO
    tile = choose_tile(out_features, hidden.dtype)
    product_kernel[(triton.cdiv(out_features, tile.rows), triton.cdiv(num_tokens, tile.tokens))](
        hidden.contiguous(),
        weight,
        weight if bias is None else bias,
        out_TO,
        num_tokens,
        D=depth,
        O=out_features,
        HAS_BIAS=bias is not None,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        BLOCK_K=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
        **launch_options(out_TO),
    )
    return out_TO


def norm_linear(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out_size: int,
    bias: torch.Tensor | None = None,
    weight_offset: float | None = None,
) -> torch.Tensor:
    """Return `linear` of the norm of `residual += hidden`."""
    return linear(add_rms_norm(residual, hidden, norm_weight, eps, weight_offset), weight, out_size, bias)


def compile_cases() -> list[tuple[Any, ...]]:
    """Return the products of queries, keys and values of Qwen3-30B-A3B, and of its head; one in float32."""
    cases = []
    for out_features, dtype, of in ((5120, "bf16", torch.bfloat16), (151_936, "bf16", torch.bfloat16),
                                    (5120, "fp32", torch.float32)):  # fmt: skip
        tile = choose_tile(out_features, of)
        signature = dict.fromkeys(("hidden", "weight", "bias", "out"), f"*{dtype}") | {"num_tokens": "i32"}
        sizes: dict[str, object] = {"D": 2048, "O": out_features, "HAS_BIAS": False}
        sizes |= {"ROWS": tile.rows, "TOKENS": tile.tokens, "BLOCK_K": tile.depth}
        name = f"fixed product {dtype} O={out_features}"
        cases.append((name, product_kernel, signature, sizes, tile.num_warps, tile.num_stages))
    return cases

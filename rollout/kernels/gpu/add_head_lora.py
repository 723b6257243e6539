"""`add_head_lora` as one Triton kernel, whatever adapters a step has.

A program takes 16 tokens and some columns of one head.  For each adapter among its tokens it multiplies with A, keeps
the product in registers, and multiplies it with B.  Programs of other columns of the head repeat the product with A:
it is short, and saves a launch.  A recorded step holds for all adapters, and a token's bits do not depend on the
others, for the reasons in `add_lora.py`.

Shapes: T tokens, H heads, D and V features and row of the input, O and W columns and row of the result, S slots,
R greatest rank.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_lora import rank_tile
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_TILE_T, _TILE_D, _TILE_O = 16, 64, 128
_WARPS, _STAGES = 4, 2


@triton.jit(do_not_specialize=["num_tokens"])
def head_lora_kernel(
    out,
    hidden,
    slots,
    a,
    b,
    ranks,
    result,
    num_tokens,
    S: tl.constexpr,
    H: tl.constexpr,
    A_HEADS: tl.constexpr,  # H, or 1 for a matrix that all heads share; B_HEADS as well
    B_HEADS: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    O: tl.constexpr,
    W: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_O: tl.constexpr,
):
    """Write a tile of `result` [T, H, W]: `out` and, for tokens with an adapter, their products in the first O."""
    wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    head, first_column = tl.program_id(1), tl.program_id(2) * TILE_O
    column = first_column + tl.arange(0, TILE_O)
    row = token * H + head
    place = row[None, :] * W + column[:, None]
    inside = (column < W)[:, None] & (token < num_tokens)[None, :]
    own = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    slot_of = tl.load(slots + token, mask=token < num_tokens, other=-1)
    matrix_a, matrix_b = a + (head % A_HEADS) * D * R, b + (head % B_HEADS) * R * O
    for slot in range(S):
        has_it = slot_of == slot
        if (tl.max(has_it.to(tl.int32), 0) > 0) & (first_column < O):
            count = tl.load(ranks + slot)
            if count > 0:
                product = tl.zeros((TILE_O, TILE_T), tl.float32)
                for first_rank in range(0, count, TILE_R):
                    rank = first_rank + tl.arange(0, TILE_R)
                    h = tl.zeros((TILE_R, TILE_T), tl.float32)
                    for first in range(0, D, TILE_D):
                        at = first + tl.arange(0, TILE_D)
                        a_mask = (rank < count)[:, None] & (at < D)[None, :]
                        x_mask = (at < D)[:, None] & (token < num_tokens)[None, :]
                        w = tl.load(matrix_a + at[None, :] * R + rank[:, None], mask=a_mask, other=0.0)
                        x = tl.load(hidden + row[None, :] * V + at[:, None], mask=x_mask, other=0.0)
                        h = tl.dot(w, x, h, input_precision="ieee")
                    b_mask = (column < O)[:, None] & (rank < count)[None, :]
                    w = tl.load(matrix_b + rank[None, :] * O + column[:, None], mask=b_mask, other=0.0)
                    product = tl.dot(w.to(tl.float32), h, product, input_precision="ieee")
                own = tl.where(has_it[None, :] & (column < O)[:, None], own + product, own)
        matrix_a += A_HEADS * D * R
        matrix_b += B_HEADS * R * O
    tl.store(result + place, own.to(result.dtype.element_ty), mask=inside)


def add_head_lora(
    out: torch.Tensor,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Return out [T, H, W] plus (hidden [T, H V] @ A) @ B in each head of a token; see the operator."""
    num_tokens, (num_slots, a_heads, depth, max_rank) = hidden.shape[0], a.shape
    assert a.is_contiguous() and b.is_contiguous() and ranks.is_contiguous(), "slots are dense"
    result = torch.empty_like(out, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return result
    width = result[0].numel() // num_heads
    head_lora_kernel[(triton.cdiv(num_tokens, _TILE_T), num_heads, triton.cdiv(width, _TILE_O))](
        out.contiguous(),
        hidden.contiguous(),
        slots,
        a,
        b,
        ranks,
        result,
        num_tokens,
        S=num_slots,
        H=num_heads,
        A_HEADS=a_heads,
        B_HEADS=b.shape[1],
        D=depth,
        V=hidden.shape[1] // num_heads,
        R=max_rank,
        O=b.shape[3],
        W=width,
        TILE_T=_TILE_T,
        TILE_D=_TILE_D,
        TILE_R=rank_tile(max_rank),
        TILE_O=_TILE_O,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
        **launch_options(out),
    )
    return result


def compile_cases() -> list[tuple[Any, ...]]:
    """Return queries and values of DeepSeek-V3, 8 slots of rank 16, and queries with 32 of rank 256."""
    signature = dict.fromkeys(("out", "hidden", "a", "b", "result"), "*bf16")
    signature |= {"slots": "*i64", "ranks": "*i64", "num_tokens": "i32"}
    of_queries = {"A_HEADS": 128, "B_HEADS": 1, "D": 128, "V": 192, "O": 512, "W": 576}
    of_values = {"A_HEADS": 1, "B_HEADS": 128, "D": 512, "V": 512, "O": 128, "W": 128}
    cases: list[tuple[Any, ...]] = []
    for name, sizes, num_slots, max_rank in (
        ("queries", of_queries, 8, 16),
        ("values", of_values, 8, 16),
        ("queries", of_queries, 32, 256),
    ):
        tile = {"TILE_T": _TILE_T, "TILE_D": _TILE_D, "TILE_R": rank_tile(max_rank), "TILE_O": _TILE_O}
        shape: dict[str, object] = {"S": num_slots, "H": 128, "R": max_rank, **sizes, **tile}
        what = f"LoRA by head, {name} S={num_slots} R={max_rank}"
        cases.append((what, head_lora_kernel, signature, shape, _WARPS, _STAGES))
    return cases

"""`add_lora` as two Triton kernels, whatever adapters a step has.

    shrink   (16 tokens, part and ranks, split of D)   hidden times A of each adapter among the tokens, in float32
    expand   (16 tokens, columns of one part)          sums over splits, times B, added to the result, rounded once

Punica (Chen et al., 2023) computes such products as two kernels, over segments of tokens with one adapter.
A program looks at the adapters of its tokens, and multiplies the tile once for each that is among them; a token keeps
the product of its own.  Nothing is sorted and nothing waits, so a recorded step holds for all adapters that come and
go.  An adapter's matrices are read once for each tile that has a token of it; equal ones of neighbouring programs come
from the second cache.

Matrices are on the left of a product, tokens on the right.  A token's sums run over tiles of one shape in one order,
and the splits depend on D alone: its bits do not depend on the other tokens, or on their adapters.

Shapes: T tokens, D input features, O output features, S slots, P parts, R greatest rank, N splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_TILE_T, _TILE_D, _TILE_O = 16, 64, 64
_MAX_TILE_R = 64
_LEAST_DEPTH, _MAX_SPLITS = 512, 4  # a split is long enough to be worth its sum
_WARPS, _STAGES, _STAGES_B = 4, 3, 2


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    hidden,
    slots,
    a,
    ranks,
    sums,
    num_tokens,
    S: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    DEPTH: tl.constexpr,  # features of a split
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """Write a tile of `sums` [N, T, P, R]; a token without an adapter gets zeros."""
    wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    part, first_rank = tl.program_id(1) % P, tl.program_id(1) // P * TILE_R
    first_feature = tl.program_id(2) * DEPTH
    rank = first_rank + tl.arange(0, TILE_R)
    slot_of = tl.load(slots + token, mask=token < num_tokens, other=-1)
    total = tl.zeros((TILE_R, TILE_T), tl.float32)
    matrix = a + part * D * R
    for slot in range(S):
        has_it = slot_of == slot
        if tl.max(has_it.to(tl.int32), 0) > 0:
            count = tl.load(ranks + slot * P + part)
            if count > first_rank:
                product = tl.zeros((TILE_R, TILE_T), tl.float32)
                for first in range(0, DEPTH, TILE_D):
                    at = first_feature + first + tl.arange(0, TILE_D)
                    a_mask = (rank < count)[:, None] & (at < D)[None, :]
                    x_mask = (at < D)[:, None] & (token < num_tokens)[None, :]
                    w = tl.load(matrix + at[None, :] * R + rank[:, None], mask=a_mask, other=0.0)
                    x = tl.load(hidden + token[None, :] * D + at[:, None], mask=x_mask, other=0.0)
                    product = tl.dot(w, x, product, input_precision="ieee")
                total = tl.where(has_it[None, :], product, total)
        matrix += P * D * R
    row = (tl.program_id(2).to(tl.int64) * num_tokens + token) * P + part
    inside = (rank < R)[:, None] & (token < num_tokens)[None, :]
    tl.store(sums + row[None, :] * R + rank[:, None], total, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    out,
    slots,
    sums,
    b,
    ranks,
    result,
    num_tokens,
    COLUMNS: tl.constexpr,  # where each part begins, and the end
    S: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    O: tl.constexpr,
    N: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_O: tl.constexpr,
):
    """Write a tile of `result` [T, O]: `out` and, for tokens with an adapter, their `sums` [N, T, P, R] times B."""
    wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    part, first, end, passed = 0, 0, 0, 0
    for p in tl.static_range(P):
        tile, num_tiles = tl.program_id(1) - passed, (COLUMNS[p + 1] - COLUMNS[p] + TILE_O - 1) // TILE_O
        if (tile >= 0) & (tile < num_tiles):
            part, first, end = p, COLUMNS[p] + tile * TILE_O, COLUMNS[p + 1]
        passed += num_tiles
    column = first + tl.arange(0, TILE_O)
    inside = (column < end)[:, None] & (token < num_tokens)[None, :]
    place = token[None, :] * O + column[:, None]
    own = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    slot_of = tl.load(slots + token, mask=token < num_tokens, other=-1)
    matrix = b
    for slot in range(S):
        has_it = slot_of == slot
        if tl.max(has_it.to(tl.int32), 0) > 0:
            count = tl.load(ranks + slot * P + part)
            product = tl.zeros((TILE_O, TILE_T), tl.float32)
            for first_rank in range(0, count, TILE_R):
                rank = first_rank + tl.arange(0, TILE_R)
                h_mask = (rank < count)[:, None] & (token < num_tokens)[None, :]
                h = tl.zeros((TILE_R, TILE_T), tl.float32)
                for split in tl.static_range(N):
                    row = (split * num_tokens + token) * P + part
                    h += tl.load(sums + row[None, :] * R + rank[:, None], mask=h_mask, other=0.0)
                b_mask = (column < end)[:, None] & (rank < count)[None, :]
                w = tl.load(matrix + rank[None, :] * O + column[:, None], mask=b_mask, other=0.0)
                product = tl.dot(w.to(tl.float32), h, product, input_precision="ieee")
            own = tl.where(has_it[None, :], own + product, own)
        matrix += R * O
    tl.store(result + place, own.to(result.dtype.element_ty), mask=inside)


def add_lora(
    out: torch.Tensor,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    columns: Sequence[int],
) -> torch.Tensor:
    """Return out [T, O] plus (hidden [T, D] @ A) @ B of each token's adapter; see the operator."""
    num_tokens, (num_slots, num_parts, depth, max_rank) = out.shape[0], a.shape
    assert a.is_contiguous() and b.is_contiguous() and ranks.is_contiguous(), "slots are dense"
    result_TO = torch.empty_like(out, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return result_TO
    split, tile_r, tiles = split_depth(depth), rank_tile(max_rank), triton.cdiv(num_tokens, _TILE_T)
    num_splits = triton.cdiv(depth, split)
    sums = torch.empty((num_splits, num_tokens, num_parts, max_rank), dtype=torch.float32, device=out.device)
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    shape = {"S": num_slots, "P": num_parts, "R": max_rank, "TILE_T": _TILE_T, "TILE_R": tile_r}
    shrink_kernel[(tiles, num_parts * triton.cdiv(max_rank, tile_r), num_splits)](
        hidden.contiguous(),
        slots,
        a,
        ranks,
        sums,
        num_tokens,
        D=depth,
        DEPTH=split,
        TILE_D=_TILE_D,
        num_stages=_STAGES,
        **shape,
        **options,
        **launch_options(out),
    )
    expand_kernel[(tiles, sum(triton.cdiv(end - first, _TILE_O) for first, end in pairwise(columns)))](
        out.contiguous(),
        slots,
        sums,
        b,
        ranks,
        result_TO,
        num_tokens,
        COLUMNS=tuple(columns),
        O=out.shape[1],
        N=num_splits,
        TILE_O=_TILE_O,
        num_stages=_STAGES_B,
        **shape,
        **options,
        **launch_options(out),
    )
    return result_TO


def split_depth(depth: int) -> int:
    """Return how many of `depth` features a split has: at most four splits, of whole tiles."""
    least = max(_LEAST_DEPTH, triton.cdiv(depth, _MAX_SPLITS))
    return triton.cdiv(least, _TILE_D) * _TILE_D


def rank_tile(max_rank: int) -> int:
    """Return the ranks of a tile; a tensor core takes 16 at least."""
    return min(max(triton.next_power_of_2(max_rank), 16), _MAX_TILE_R)


def compile_cases() -> list[tuple[Any, ...]]:
    """Return both kernels for queries, keys and values of Qwen3-30B-A3B, with 8 slots of rank 16 and 32 of rank 256."""
    cases: list[tuple[Any, ...]] = []
    depth, columns = 2048, (0, 4096, 4608, 5120)
    for dtype, num_slots, max_rank in (("bf16", 8, 16), ("bf16", 32, 256), ("fp32", 8, 16)):
        tile_r, split = rank_tile(max_rank), split_depth(depth)
        common = {"slots": "*i64", "ranks": "*i64", "sums": "*fp32", "num_tokens": "i32"}
        shape: dict[str, object] = {"S": num_slots, "P": 3, "R": max_rank, "TILE_T": _TILE_T, "TILE_R": tile_r}
        signature = dict.fromkeys(("hidden", "a"), f"*{dtype}") | common
        sizes = {"D": depth, "DEPTH": split, "TILE_D": _TILE_D} | shape
        name = f"{dtype} S={num_slots} R={max_rank}"
        cases.append((f"LoRA, A {name}", shrink_kernel, signature, sizes, _WARPS, _STAGES))
        signature = dict.fromkeys(("out", "b", "result"), f"*{dtype}") | common
        sizes = {"COLUMNS": columns, "O": columns[-1], "N": triton.cdiv(depth, split), "TILE_O": _TILE_O} | shape
        cases.append((f"LoRA, B {name}", expand_kernel, signature, sizes, _WARPS, _STAGES_B))
    return cases

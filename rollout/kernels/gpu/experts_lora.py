"""The products of experts with the adapters of many tokens, as two Triton kernels for each of an expert's products.

    shrink   (16 places, part and ranks, split of the depth)   rows times A of their adapters, in float32
    expand   (16 places, columns of one part)                  sums over splits, times B, in float32

Of gate and up, `expand` writes `delta` in float32: the product with the weights adds it to its sums, before it rounds
them (`experts_kernels`).  Of down, it adds to the rounded outputs, biases included, and rounds once more, as `add_lora`
does: an output in float32 would cost more memory than all the rest.  So an adapted call has four launches more than a
plain one, whatever adapters its tokens have.

The blocks of `experts_kernels` are cut into tiles of 16 places.  A tile has one expert, and tokens of several adapters:
a program multiplies the tile once for each adapter that is among them, as in `add_lora`.  Tokens without an adapter
cost no memory: nothing is written for them, or read.  Nothing is sorted anew and nothing waits.

Matrices are on the left of a product, tokens on the right.  A token's sums run over tiles of one shape in one order,
and the splits depend on the depth alone.  So its bits do not depend on the other tokens, or on their adapters.

Shapes: T tokens, K slots of a token, A = T K assignments, P experts stored here, D hidden, I expert intermediate, L
adapter slots, R greatest rank, N splits; Q parts of a product: gate and up, or down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_lora import rank_tile, split_depth
from rollout.kernels.gpu.experts_kernels import block_of_few
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_TILE_T, _TILE_D, _TILE_O = 16, 64, 64  # every block of the plan is a multiple of 16 places
_WARPS, _STAGES, _STAGES_B = 4, 3, 2


@triton.jit
def _places(
    order_ptr, blocks_ptr, num_assignments, P: tl.constexpr, FEW: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE_T: tl.constexpr,
):  # fmt: skip
    """Find the tile of this program: expert, number of places, places and assignments [TILE_T].

    Behind the last place it is repeated.  A tile without places has any expert, place and assignment.
    """
    tile = tl.program_id(0)
    if FEW > 0:
        expert, num_places, places = block_of_few(order_ptr, tile, num_assignments, P, FEW, TILE_T)
        assignments = places
    else:
        block = tile // (BLOCK_M // TILE_T)
        first = tile % (BLOCK_M // TILE_T) * TILE_T
        num_places = tl.minimum(tl.load(blocks_ptr + 3 * block + 2) - first, TILE_T)
        is_filled = num_places > 0
        expert = tl.load(blocks_ptr + 3 * block, mask=is_filled, other=0)
        begin = tl.load(blocks_ptr + 3 * block + 1, mask=is_filled, other=0) + first
        places = begin + tl.minimum(tl.arange(0, TILE_T), num_places - 1)
        assignments = tl.load(order_ptr + places, mask=tl.arange(0, TILE_T) < num_places, other=0)
    return expert.to(tl.int64), num_places, places.to(tl.int64), assignments


@triton.jit(do_not_specialize=["num_assignments"])
def experts_shrink_kernel(
    rows_ptr,
    slots_ptr,
    a_ptr,
    ranks_ptr,
    sums_ptr,
    order_ptr,
    blocks_ptr,
    num_assignments,
    D: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    FIRST_PART: tl.constexpr,
    BY_PLACE: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DEPTH: tl.constexpr,  # of a split
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """Write a tile of `sums` [N, A, Q, R] by place: rows of D features times `a` [P, L, Q, D, R].

    The rows are of tokens [T, D], or BY_PLACE of places [A, D].  `ranks` [P, L, 3]: of all parts of an expert, of which
    these begin with FIRST_PART.
    """
    wait_for_predecessor()
    expert, num_places, places, assignments = _places(order_ptr, blocks_ptr, num_assignments, P, FEW, BLOCK_M, TILE_T)
    if num_places <= 0:
        return
    tokens = (assignments // K).to(tl.int64)
    slot_of = tl.load(slots_ptr + tokens)
    rows = places if BY_PLACE else tokens
    part, first_rank = tl.program_id(1) % Q, tl.program_id(1) // Q * TILE_R
    first_feature = tl.program_id(2) * DEPTH
    rank = first_rank + tl.arange(0, TILE_R)
    total = tl.zeros((TILE_R, TILE_T), tl.float32)
    for slot in range(L):
        has_it = slot_of == slot
        if tl.max(has_it.to(tl.int32), 0) > 0:
            adapter = expert * L + slot
            count = tl.load(ranks_ptr + adapter * 3 + FIRST_PART + part)
            if count > first_rank:
                matrix = a_ptr + (adapter * Q + part) * (D * R)
                product = tl.zeros((TILE_R, TILE_T), tl.float32)
                for first in range(0, DEPTH, TILE_D):
                    at = first_feature + first + tl.arange(0, TILE_D)
                    a_mask = (rank < count)[:, None] & (at < D)[None, :]
                    w = tl.load(matrix + at[None, :] * R + rank[:, None], mask=a_mask, other=0.0)
                    x_mask = (at < D)[:, None] & has_it[None, :]
                    x = tl.load(rows_ptr + rows[None, :] * D + at[:, None], mask=x_mask, other=0.0)
                    product = tl.dot(w, x, product, input_precision="ieee")
                total = tl.where(has_it[None, :], product, total)
    written = (tl.arange(0, TILE_T) < num_places) & (slot_of >= 0)
    place = (tl.program_id(2).to(tl.int64) * num_assignments + places) * Q + part
    inside = (rank < R)[:, None] & written[None, :]
    tl.store(sums_ptr + place[None, :] * R + rank[:, None], total, mask=inside)


@triton.jit(do_not_specialize=["num_assignments"])
def experts_expand_kernel(
    sums_ptr,
    slots_ptr,
    b_ptr,
    ranks_ptr,
    out_ptr,
    order_ptr,
    blocks_ptr,
    num_assignments,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    L: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    ADDS: tl.constexpr,
    FIRST_PART: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_O: tl.constexpr,
):
    """Write a tile of `out` [A, Q WIDTH] by place: `sums` [N, A, Q, R] times `b` [P, L, R, Q WIDTH].

    ADDS: add it to `out` by assignment.
    """
    wait_for_predecessor()
    expert, num_places, places, assignments = _places(order_ptr, blocks_ptr, num_assignments, P, FEW, BLOCK_M, TILE_T)
    if num_places <= 0:
        return
    O: tl.constexpr = Q * WIDTH
    TILES: tl.constexpr = (WIDTH + TILE_O - 1) // TILE_O
    slot_of = tl.load(slots_ptr + assignments // K)
    part = tl.program_id(1) // TILES
    in_part = tl.program_id(1) % TILES * TILE_O + tl.arange(0, TILE_O)
    column = part * WIDTH + in_part
    own = tl.zeros((TILE_O, TILE_T), tl.float32)
    for slot in range(L):
        has_it = slot_of == slot
        if tl.max(has_it.to(tl.int32), 0) > 0:
            adapter = expert * L + slot
            count = tl.load(ranks_ptr + adapter * 3 + FIRST_PART + part)
            matrix = b_ptr + adapter * (R * O)
            product = tl.zeros((TILE_O, TILE_T), tl.float32)
            for first_rank in range(0, count, TILE_R):
                rank = first_rank + tl.arange(0, TILE_R)
                h_mask = (rank < count)[:, None] & has_it[None, :]
                h = tl.zeros((TILE_R, TILE_T), tl.float32)
                for split in tl.static_range(N):
                    place = (split * num_assignments + places) * Q + part
                    h += tl.load(sums_ptr + place[None, :] * R + rank[:, None], mask=h_mask, other=0.0)
                b_mask = (in_part < WIDTH)[:, None] & (rank < count)[None, :]
                w = tl.load(matrix + rank[None, :] * O + column[:, None], mask=b_mask, other=0.0)
                product = tl.dot(w.to(tl.float32), h, product, input_precision="ieee")
            own = tl.where(has_it[None, :], product, own)
    written = (tl.arange(0, TILE_T) < num_places) & (slot_of >= 0)
    inside = (in_part < WIDTH)[:, None] & written[None, :]
    rows = assignments.to(tl.int64) if ADDS else places
    out_ptrs = out_ptr + rows[None, :] * O + column[:, None]
    if ADDS:
        own += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, own.to(out_ptr.dtype.element_ty), mask=inside)


class Blocks(NamedTuple):
    """Assignments by expert; see the picture in `experts_kernels`.

    Without a plan `order_A` are the ids, and `few` is how many of them a program compares; else it is 0.  A block has
    at most `tokens` places.
    """

    order_A: torch.Tensor  # int32, or int64
    table_N3: torch.Tensor | None  # int32
    num_blocks: int
    few: int
    top_k: int
    tokens: int

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        return self.order_A, self.table_N3, self.order_A.shape[0]


class Delta(NamedTuple):
    """The products with the adapters of gate and up, `sums` [A, 2I] float32 by place; of tokens with `slots` >= 0."""

    sums: torch.Tensor
    slots: torch.Tensor


class Adapters(NamedTuple):
    """The adapter of each token, and the matrices of all adapters and experts; see `adapted_experts`.

    `slots` [T] int64; `a13` [P, L, 2, D, R], `b13` [P, L, R, 2I], `a2` [P, L, I, R], `b2` [P, L, R, D]; `ranks`
    [P, L, 3] int64.
    """

    slots: torch.Tensor
    a13: torch.Tensor
    b13: torch.Tensor
    a2: torch.Tensor
    b2: torch.Tensor
    ranks: torch.Tensor

    def gate_up(self, hidden_TD: torch.Tensor, blocks: Blocks) -> Delta:
        """Multiply the rows of tokens with the adapters of gate and up."""
        size = blocks.order_A.shape[0], self.b13.shape[3]
        sums = torch.empty(size, dtype=torch.float32, device=hidden_TD.device)
        self._product(hidden_TD, self.a13, self.b13, blocks, sums, first_part=0)
        return Delta(sums, self.slots)

    def add_down(self, inner_AI: torch.Tensor, blocks: Blocks, out_TKD: torch.Tensor) -> None:
        """Add the products of the rows of places with the adapters of down to the outputs of assignments."""
        self._product(inner_AI, self.a2.unsqueeze(2), self.b2, blocks, out_TKD, first_part=2)

    def _product(
        self,
        rows: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        blocks: Blocks,
        out: torch.Tensor,
        first_part: int,
    ) -> None:
        assert a.is_contiguous() and b.is_contiguous() and self.ranks.is_contiguous(), "slots are dense"
        (experts, slots, parts, depth, max_rank), columns = a.shape, b.shape[3]
        count, tiles = blocks.order_A.shape[0], _num_tiles(blocks)
        split, tile_r = split_depth(depth), rank_tile(max_rank)
        num_splits = triton.cdiv(depth, split)
        sums = torch.empty((num_splits, count, parts, max_rank), dtype=torch.float32, device=rows.device)
        shape = _constants(blocks, experts, slots, parts, max_rank, first_part)
        options = {"num_warps": _WARPS, "enable_fp_fusion": False}
        experts_shrink_kernel[(tiles, parts * triton.cdiv(max_rank, tile_r), num_splits)](
            rows,
            self.slots,
            a,
            self.ranks,
            sums,
            *blocks.operands,
            D=depth,
            BY_PLACE=first_part > 0,
            DEPTH=split,
            TILE_D=_TILE_D,
            num_stages=_STAGES,
            **shape,
            **options,
            **launch_options(rows),
        )
        experts_expand_kernel[(tiles, parts * triton.cdiv(columns // parts, _TILE_O))](
            sums,
            self.slots,
            b,
            self.ranks,
            out,
            *blocks.operands,
            WIDTH=columns // parts,
            N=num_splits,
            ADDS=first_part > 0,
            TILE_O=_TILE_O,
            num_stages=_STAGES_B,
            **shape,
            **options,
            **launch_options(rows),
        )


def _num_tiles(blocks: Blocks) -> int:
    return blocks.num_blocks if blocks.few else blocks.num_blocks * (blocks.tokens // _TILE_T)


def _constants(
    blocks: Blocks, experts: int, slots: int, parts: int, max_rank: int, first_part: int
) -> dict[str, object]:
    """Return the constants that both kernels have."""
    sizes = {"K": blocks.top_k, "P": experts, "L": slots, "Q": parts, "R": max_rank, "FIRST_PART": first_part}
    tiles = {"FEW": blocks.few, "BLOCK_M": blocks.tokens, "TILE_T": _TILE_T, "TILE_R": rank_tile(max_rank)}
    return {**sizes, **tiles}


def compile_cases() -> list[tuple[Any, ...]]:
    """Return both kernels for experts of Qwen3-30B-A3B: 8 slots of rank 16 without a plan, 32 of rank 256 with one."""
    return [case for given in _CASES for case in _cases_of(*given)]


_CASES = (("bf16", 8, 16, 64, 16), ("bf16", 32, 256, 0, 128))


def _cases_of(dtype: str, slots: int, max_rank: int, few: int, tokens: int) -> Iterator[tuple[Any, ...]]:
    name = f"{dtype} L={slots} R={max_rank}, blocks of {tokens}{', few' if few else ''}"
    empty = torch.empty(0)
    blocks = Blocks(empty, None, 0, few, top_k=8, tokens=tokens)
    common = {"slots_ptr": "*i64", "ranks_ptr": "*i64", "sums_ptr": "*fp32", "num_assignments": "i32"}
    common["order_ptr"] = "*i64" if few else "*i32"
    absent: dict[str, object] = {"blocks_ptr": None} if few else {}
    if not few:
        common["blocks_ptr"] = "*i32"
    for what, first_part, parts, depth, width in (("gate and up", 0, 2, 2048, 768), ("down", 2, 1, 768, 2048)):
        shape = _constants(blocks, 128, slots, parts, max_rank, first_part) | absent
        split = split_depth(depth)
        signature = {"rows_ptr": f"*{dtype}", "a_ptr": f"*{dtype}"} | common
        sizes = {"D": depth, "BY_PLACE": first_part > 0, "DEPTH": split, "TILE_D": _TILE_D} | shape
        yield f"experts LoRA, A of {what}, {name}", experts_shrink_kernel, signature, sizes, _WARPS, _STAGES
        signature = {"b_ptr": f"*{dtype}", "out_ptr": f"*{dtype}" if first_part else "*fp32"} | common
        sizes = {"WIDTH": width, "N": triton.cdiv(depth, split), "ADDS": first_part > 0, "TILE_O": _TILE_O} | shape
        yield f"experts LoRA, B of {what}, {name}", experts_expand_kernel, signature, sizes, _WARPS, _STAGES_B

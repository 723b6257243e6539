"""Experts of rows that lie by expert already, as DeepEP's low-latency mode brings them: three launches.

    expert 0   [ row row row  .   .   . ]     N places, of which the first counts[0] hold a row
    expert 1   [ row  .   .   .   .   . ]

Most places are empty, as each expert has room for all tokens of all ranks.  So the tiles are chosen for the rows that
are expected, and not for the places.  Empty places cost a program that returns at once, and get no output.  The
products are `fused_experts`', so a row has the same bits here and there, with any tiles.

Shapes: P experts, N places of an expert, D hidden, I expert intermediate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu import fused_experts as experts
from rollout.kernels.gpu.experts_lora import Blocks
from rollout.kernels.gpu.experts_plan import choose_tiles
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_CHUNK = 1024  # places that a program of the plan writes at once


@triton.jit(do_not_specialize=["num_blocks"])
def packed_plan_kernel(
    counts_ptr,
    order_ptr,
    blocks_ptr,
    num_blocks,
    N: tl.constexpr,
    P: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write `order` and `blocks` (see `experts_kernels`) of counts [P] int32, with one program for each expert.

    A row's place is its assignment.  BINS: a power of two above P.
    """
    wait_for_predecessor()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    chunk = tl.arange(0, CHUNK)
    counts = tl.load(counts_ptr + bins, mask=bins < P, other=0).to(tl.int32)
    of_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    count = tl.sum(tl.where(bins == expert, counts, 0))
    first_block = tl.sum(tl.where(bins < expert, of_blocks, 0))
    last_block = first_block + (count + BLOCK_M - 1) // BLOCK_M
    place = expert * N
    for block in range(first_block, last_block):
        first = (block - first_block) * BLOCK_M
        tl.store(blocks_ptr + 3 * block, expert)
        tl.store(blocks_ptr + 3 * block + 1, place + first)
        tl.store(blocks_ptr + 3 * block + 2, tl.minimum(count - first, BLOCK_M))
    if expert == P - 1:
        for start in range(last_block, num_blocks, CHUNK):
            tl.store(blocks_ptr + 3 * (start + chunk) + 2, 0, mask=start + chunk < num_blocks)
    for start in range(0, count, CHUNK):
        rows = start + chunk
        tl.store(order_ptr + place + rows, place + rows, mask=rows < count)


def packed_experts(
    hidden: torch.Tensor,
    counts: torch.Tensor,
    expected: int,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Apply SwiGLU of expert p to the first `counts[p]` rows of `hidden[p]` [P, N, D]; return [P, N, D].

    `counts` [P] int32; weights and the other arguments as of `fused_experts`.  Tiles are chosen for `expected` rows of
    all experts; the result does not depend on it.  Places without a row are not written.
    """
    num_experts, places, _ = hidden.shape
    held = experts.Matrices(w13, w2, w13_bias, w2_bias)
    tiles = choose_tiles(expected, num_experts, w13.dtype)
    order_A = torch.empty(num_experts * places, dtype=torch.int32, device=hidden.device)
    num_blocks = num_experts * triton.cdiv(places, tiles.tokens)
    table_N3 = torch.empty(num_blocks, 3, dtype=torch.int32, device=hidden.device)
    packed_plan_kernel[(num_experts,)](
        counts,
        order_A,
        table_N3,
        num_blocks,
        N=places,
        **experts.plan_constants(num_experts, tiles.tokens, _CHUNK),
        num_warps=experts.PLAIN_WARPS,
        enable_fp_fusion=False,
        **launch_options(counts),
    )
    blocks = Blocks(order_A, table_N3, num_blocks, 0, 1, tiles.tokens)
    inner_AI = experts._gate_up(hidden.flatten(0, 1), held, blocks, tiles, limit, alpha)
    out_PND = torch.empty_like(hidden)
    experts._down(inner_AI, held, blocks, tiles, out_PND)
    return out_PND


def compile_cases() -> list[tuple[object, ...]]:
    """Return the plan for 16 experts of a rank, with room for 128 tokens of each of 8 ranks."""
    signature = {"counts_ptr": "*i32", "order_ptr": "*i32", "blocks_ptr": "*i32", "num_blocks": "i32"}
    constants = {"N": 1024, **experts.plan_constants(16, 64, _CHUNK)}
    return [("packed experts plan, blocks of 64", packed_plan_kernel, signature, constants, experts.PLAIN_WARPS, 3)]

"""The sum over ranks by memory that all of them see, as one Triton kernel: for small tensors, in rank order.

Each rank has a `Room` in the memory of its device, and the addresses of all rooms.  A block of the kernel writes its
part of the tensor into this rank's room and raises its flag in every room.  It then waits for the flags of all ranks in
its own room, reads the parts of all ranks in rank order, and adds them in float32.  No other call is needed before or
after, so that a CUDA graph holds the whole sum as one launch.

A flag is the number of times that the block was used, counted on the device: a replay of a graph counts on.  A room has
two places for each block, used by turns.  A rank writes into a place again after two uses.  By then every rank has
raised the flag of the use between, which follows its reads of the first.

Shapes: N ranks, B blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

BLOCK = 1024
"""Elements of a block."""
MAX_BLOCKS = 256
"""Blocks of a call at most.  All of them are on the device at once, since each waits for its like on other devices."""
_ELEMENT_BYTES = 4
_WARPS = 4


def num_bytes(ranks: int) -> int:
    """Return the bytes of a rank's room: flags [B, N] and uses [B] in int32, then two places for each block."""
    return _header_bytes(ranks) + 2 * MAX_BLOCKS * BLOCK * _ELEMENT_BYTES


def _header_bytes(ranks: int) -> int:
    return -(-4 * MAX_BLOCKS * (ranks + 1) // 256) * 256


@triton.jit
def peer_sum_kernel(
    x, out, rooms, size, RANK: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    HEADER: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    dtype: tl.constexpr = x.dtype.element_ty
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    mine = tl.load(rooms + RANK)
    flags = mine.to(tl.pointer_type(tl.int32))
    uses = flags + BLOCKS * N + block
    use = tl.load(uses) + 1
    place = HEADER + ((use & 1) * BLOCKS + block) * BLOCK * 4  # bytes from a room's start
    to = (mine + place).to(tl.pointer_type(dtype)) + tl.arange(0, BLOCK)
    tl.store(to, tl.load(x + at, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # all threads have read the use, and the release below covers the stores of all
    tl.store(uses, use)
    for rank in tl.static_range(N):
        flag = tl.load(rooms + rank).to(tl.pointer_type(tl.int32)) + block * N + RANK
        tl.atomic_xchg(flag, use, sem="release", scope="sys")
    for rank in tl.static_range(N):
        # A rank may be one use ahead, and the count may pass its largest value: the difference tells.
        while tl.atomic_add(flags + block * N + rank, 0, sem="acquire", scope="sys") - use < 0:
            pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(N):
        part = (tl.load(rooms + rank) + place).to(tl.pointer_type(dtype)) + tl.arange(0, BLOCK)
        value = tl.load(part, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if rank == 0:
            total = value  # a sum that begins with zero would turn -0.0 into 0.0
        else:
            total += value
    tl.store(out + at, total.to(dtype), mask=inside)


def peer_sum(x: torch.Tensor, rooms: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the sum of `x` of all ranks, which all call this with the same shape and dtype.

    `rooms`: the addresses of the ranks' rooms, int64 [N] on the device of `x`.
    """
    x, ranks = x.contiguous(), rooms.shape[0]
    assert fits(x)
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        peer_sum_kernel[grid](
            x,
            out,
            rooms,
            x.numel(),
            **_constants(rank, ranks),
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **launch_options(x),
        )
    return out


def fits(x: torch.Tensor) -> bool:
    """Return whether a tensor is of a size and a dtype that a room takes."""
    return x.numel() <= MAX_BLOCKS * BLOCK and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _constants(rank: int, ranks: int) -> dict[str, int]:
    return {"RANK": rank, "N": ranks, "BLOCK": BLOCK, "BLOCKS": MAX_BLOCKS, "HEADER": _header_bytes(ranks)}


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for two ranks and for a machine of eight."""
    types = {"x": "*bf16", "out": "*bf16", "rooms": "*i64", "size": "i32"}
    return [(f"peer_sum N={ranks}", peer_sum_kernel, types, _constants(1, ranks), _WARPS, 3) for ranks in (2, 8)]

"""The sums behind a fingerprint in one Triton kernel.

A program takes `_ROWS` blocks of 4096 words.  It holds the multipliers b(j) in registers, reads each word once, and
writes for each block its sum and whether a word has all bits of a mask; a block's a(c) is computed where it is used:

    words   |....ccccccc|ccccccccccc|ccccc......|       a shard that begins `phase` words into block `first_block`
             block 7      block 8     block 9           sums [3], found [3], added up by torch: no wait for the device

Imported where there is Triton and something to run it (`block_sums.kernels_of` decides).  64-bit products wrap, so the
results equal `block_sums` bit for bit: in Triton's interpreter, and by `tests/gpu` on an H100.

Shapes: N blocks, n words.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from weight_sync.fingerprint_words import BLOCK, UNSIGNED, multipliers

_ROWS = 4
_NUM_WARPS = 8
_TYPES = {1: "*u8", 2: "*u16", 4: "*u32", 8: "*i64"}


@triton.jit
def mix_odd(k):
    """Compute `fingerprint_words.mix_odd`, uint64."""
    z = (k + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def _block_sums(
    words,
    table,
    sums,
    found,
    num_words,
    num_blocks,
    phase,
    first_block,
    MASK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum a(c) b(j) (word + 1) if WEIGHTED; otherwise b(j) word."""
    within = tl.arange(0, BLOCK)
    b = tl.load(table + within).to(tl.uint64, bitcast=True)
    for row in range(ROWS):
        block = tl.program_id(0).to(tl.int64) * ROWS + row
        at = block * BLOCK - phase + within
        is_there = (at >= 0) & (at < num_words)
        word = tl.load(words + at, mask=is_there, other=0).to(tl.uint64)
        total = word
        if WEIGHTED:
            total = tl.where(is_there, word + 1, 0)
        total = tl.sum(total * b, 0)
        if WEIGHTED:
            total = total * mix_odd(((first_block + block) * 2).to(tl.uint64))
        tl.store(sums + block, total.to(tl.int64, bitcast=True), mask=block < num_blocks)
        is_masked = is_there & ((word & MASK) == MASK)
        tl.store(found + block, tl.max(is_masked.to(tl.int8), 0), mask=block < num_blocks)


def gpu_block_sums(words: torch.Tensor, mask: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the operator `weight_sync::block_sums`: words [N, BLOCK] -> int64 [N], bool [N]."""
    assert words.is_contiguous() and words.shape[1] == BLOCK
    sums_N, found_N = _launch(words.view(-1), words.shape[0], 0, 0, mask, weighted=False)
    return sums_N, found_N if mask else torch.ones_like(found_N)


def gpu_sum(words: torch.Tensor, offset: int) -> torch.Tensor:
    """Return F of a shard whose first word is at flat index `offset`: int64 [1], which wrapped.

    `words` [n]: contiguous, of a dtype in `UNSIGNED`.  Nothing is read back from the device.
    """
    if words.numel() == 0:
        return torch.zeros(1, dtype=torch.int64, device=words.device)
    first_block, phase = divmod(offset, BLOCK)
    num_blocks = -(-(phase + words.numel()) // BLOCK)
    sums_N, _ = _launch(words, num_blocks, phase, first_block, 0, weighted=True)
    return sums_N.sum().view(1)


def _launch(
    words: torch.Tensor, num_blocks: int, phase: int, first_block: int, mask: int, *, weighted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert words.is_contiguous() and words.dtype in UNSIGNED.values(), words.dtype
    sums_N = torch.empty(num_blocks, dtype=torch.int64, device=words.device)
    found_N = torch.empty(num_blocks, dtype=torch.bool, device=words.device)
    if num_blocks == 0:
        return sums_N, found_N
    grid = (-(-num_blocks // _ROWS),)
    # Triton launches on the current device, and the words may lie on another: a trainer's, by its handle.
    with torch.cuda.device(words.device) if words.is_cuda else nullcontext():
        _block_sums[grid](
            words,
            multipliers(str(words.device)),
            sums_N,
            found_N.view(torch.int8),
            words.numel(),
            num_blocks,
            phase,
            first_block,
            MASK=mask,
            WEIGHTED=weighted,
            BLOCK=BLOCK,
            ROWS=_ROWS,
            num_warps=_NUM_WARPS,
        )
    return sums_N, found_N


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, object], int, int]]:
    """Return every configuration: name, kernel, types of the arguments, constants, warps, stages."""
    pointers = {"table": "*i64", "sums": "*i64", "found": "*i8"}
    counts = {"num_words": "i64", "num_blocks": "i32", "phase": "i32", "first_block": "i32"}
    masks = {1: 0x7F, 2: 0x7F80, 4: 0x7F80_0000, 8: 0x7FF0_0000_0000_0000}
    return [
        (
            f"fingerprint_{8 * width}{'_whole' if weighted else '_blocks'}",
            _block_sums,
            {"words": kind, **pointers, **counts},
            {"MASK": masks[width], "WEIGHTED": weighted, "BLOCK": BLOCK, "ROWS": _ROWS},
            _NUM_WARPS,
            1,
        )
        for width, kind in _TYPES.items()
        for weighted in (False, True)
    ]

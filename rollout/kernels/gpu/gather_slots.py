"""`gather_slots`: the slots that the sequences of a step read, by one Triton kernel.

Torch takes six launches, and writes every place of the table as int64 three times.  Here each slot is read and written
once.

Shapes: N sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

_BLOCK = 1024
_WARPS = 4


@triton.jit(do_not_specialize=["N"])
def gather_slots_kernel(table, spans, out, N, BLOCK: tl.constexpr):
    """Copy the slots of a sequence, with a program for each BLOCK positions of the longest one."""
    wait_for_predecessor()
    sequence = tl.program_id(0)
    count = tl.load(spans + N + sequence)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(spans + 2 * N + sequence)
    slots = tl.load(table + tl.load(spans + sequence) + at, mask=at < count, other=0)
    tl.store(out + begin + at, slots.to(tl.int32), mask=at < count)


def gather_slots(table: torch.Tensor, spans: torch.Tensor, longest: int, out: torch.Tensor) -> None:
    """Copy spans of a flat table of slots to where they belong in `out`, int32.

    `spans` [3, N] int64: the first place of each, its length, and its first place in `out`.  `longest` is the largest
    length.
    """
    if longest:
        grid = (spans.shape[1], triton.cdiv(longest, _BLOCK))
        gather_slots_kernel[grid](
            table, spans, out, spans.shape[1], BLOCK=_BLOCK, num_warps=_WARPS, **launch_options(table)
        )


def compile_cases() -> list[tuple[Any, ...]]:
    """Return the case of the slot table, and that of slots that were gathered before."""
    types = {"table": "*i64", "spans": "*i64", "out": "*i32", "N": "i32"}
    cases = ("gather_slots", types), ("gather_slots in rows", types | {"table": "*i32"})
    return [(name, gather_slots_kernel, each, {"BLOCK": _BLOCK}, _WARPS, 3) for name, each in cases]

"""`gather_slots`: the slots that the sequences of a step read, by one Triton kernel.

Torch takes six launches, and writes every place of the table as int64 three times.  Here each slot is read and written
once.

Shapes: N sequences, P slots of all of them.
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


@triton.jit
def gather_slots_kernel(table, spans, out, N, BLOCK: tl.constexpr):
    """Copy the slots of a sequence, with a program for each BLOCK positions of the longest one."""
    wait_for_predecessor()
    sequence = tl.program_id(0)
    count = tl.load(spans + N + sequence)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(spans + 2 * N + sequence)
    slots = tl.load(table + tl.load(spans + sequence) + at, mask=at < count, other=0)
    tl.store(out + begin + at, slots.to(tl.int32), mask=at < count)


def gather_slots(table: torch.Tensor, spans: torch.Tensor, longest: int, total: int) -> torch.Tensor:
    """Return slots [P] int32 of spans of a flat table: one span behind the other.

    `spans` [3, N] int64: the first place of each, its length, and the slots of those before it.  `longest` and `total`
    are the largest length and the sum of all, P.
    """
    out_P = torch.empty(total, dtype=torch.int32, device=table.device)
    if total:
        grid = (spans.shape[1], triton.cdiv(longest, _BLOCK))
        gather_slots_kernel[grid](
            table, spans, out_P, spans.shape[1], BLOCK=_BLOCK, num_warps=_WARPS, **launch_options(table)
        )
    return out_P


def compile_cases() -> list[tuple[Any, ...]]:
    """Return the case of the slot table."""
    types = {"table": "*i64", "spans": "*i64", "out": "*i32", "N": "i32"}
    return [("gather_slots", gather_slots_kernel, types, {"BLOCK": _BLOCK}, _WARPS, 3)]

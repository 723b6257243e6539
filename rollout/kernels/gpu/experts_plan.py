"""The implementation that the experts of a step run on, and its tiles: functions of shapes alone.

The host knows a shape without a look at the routes.  So the choice costs no synchronisation, and a CUDA graph of a
batch size keeps its choice.  Load is measured as assignments per stored expert, R.  Where many slots are empty, as on
one of several ranks, it is measured by the assignments that the rank expects.  The two tables are read at each call: a
benchmark may put others in their place, one row after the other, and its best rows are written here.

Tiles were chosen by arithmetic (below), but for one border.  On an H100 they were within 1 % of the best at all loads
but two, and `grouped_mm` was never the best (docs/benchmarks/gpu.md).  The two were one token and R = 64.  At R = 64
the largest tile was 2 % faster, at R = 32 it was not: so the border of bfloat16 is between these now.  Triton serves
every load: one implementation keeps a token's bits the same in decode and prefill.

    R small    reading the weights once is the limit: small tiles, so that the few experts of one token give every
               multiprocessor work, and many stages, so that enough bytes are under way
    R large    matrix units are the limit: tiles of 256 x 128, so that repeated reads from the second-level cache stay
               under its bandwidth
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeVar

import torch

from rollout.kernels.row_places import INT4_STEP, PACKED_INT4

Choice = TypeVar("Choice")
Implementation = Literal["triton", "grouped_mm"]


class Tiles(NamedTuple):
    """A tile of a product is `rows` of a weight times `tokens`."""

    tokens: int
    rows: int
    num_warps: int
    num_stages: int


# Pairs of a largest R and its implementation, ascending.  grouped_mm is taken for bfloat16 alone, where it is aligned.
EXPERT_CHOICE: tuple[tuple[float, Implementation], ...] = ((math.inf, "triton"),)

# Pairs of a largest R and its tiles, ascending, by bytes of an element of the weights.  One byte: float8, and bytes of
# two integers; with bfloat16 or float16 activations.  Two bytes: bfloat16 and float16.  Four bytes: float32.
EXPERT_TILES: dict[int, tuple[tuple[float, Tiles], ...]] = {
    1: (
        (8, Tiles(tokens=16, rows=64, num_warps=4, num_stages=5)),
        (24, Tiles(tokens=32, rows=64, num_warps=4, num_stages=4)),
        (96, Tiles(tokens=64, rows=128, num_warps=4, num_stages=3)),
        (math.inf, Tiles(tokens=128, rows=128, num_warps=8, num_stages=3)),
    ),
    2: (
        (8, Tiles(tokens=16, rows=64, num_warps=4, num_stages=6)),
        (24, Tiles(tokens=32, rows=64, num_warps=4, num_stages=5)),
        (48, Tiles(tokens=64, rows=128, num_warps=4, num_stages=4)),
        (math.inf, Tiles(tokens=128, rows=256, num_warps=8, num_stages=4)),
    ),
    4: ((math.inf, Tiles(tokens=16, rows=64, num_warps=4, num_stages=3)),),
}

_LINE_BYTES = 128  # bytes of a weight row in one step: a line of the cache, and whole blocks of scales
_FEW = 1024  # assignments that the plan reads at once
_UNPLANNED = 64  # the most assignments that each program of the products compares with one another


def choose_implementation(num_assignments: int, num_experts: int) -> Implementation:
    """Choose the implementation for this load by `EXPERT_CHOICE`."""
    return _by_load(EXPERT_CHOICE, num_assignments / num_experts)


def choose_tiles(num_assignments: int, num_experts: int, weight_dtype: torch.dtype) -> Tiles:
    """Choose the tiles for this load and weight dtype by `EXPERT_TILES`."""
    return _by_load(EXPERT_TILES[weight_dtype.itemsize], num_assignments / num_experts)


def depth_step(weight_dtype: torch.dtype) -> int:
    """Return how many columns of a weight are multiplied at once: the same for every load, as it orders the sums."""
    return INT4_STEP if weight_dtype == PACKED_INT4 else _LINE_BYTES // weight_dtype.itemsize


def max_blocks(num_assignments: int, num_experts: int, tokens: int) -> int:
    """Return how many blocks the worst routing needs.  A block has at most `tokens` assignments of one expert."""
    return num_assignments // tokens + min(num_experts, num_assignments)


def few_assignments(num_assignments: int) -> int:
    """Return how many ids a program of the products compares where nothing is planned, or 0 for more assignments."""
    return _UNPLANNED if num_assignments <= _UNPLANNED else 0


def plan_chunk(num_assignments: int) -> int:
    """Return how many assignments a program of the plan reads at once."""
    return _FEW if num_assignments <= _FEW else 2 * _FEW


def _by_load(table: tuple[tuple[float, Choice], ...], load: float) -> Choice:
    return next(choice for limit, choice in table if load <= limit)

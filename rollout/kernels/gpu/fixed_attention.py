"""Attention over paged KV with splits at fixed positions, as Triton kernels: `--enable-deterministic-inference`.

    positions    0 .. 1023 | 1024 .. 2047 | 2048 ..        a split is SPLIT positions of the sequence
    attend       each split by itself, BLOCK positions after BLOCK, with a running softmax (FlashAttention 2)
    merge        the splits of a token, one after the other, in ascending order

Splits begin at multiples of SPLIT, blocks at multiples of BLOCK, whatever part of the sequence a step computes.  What a
token does not see changes neither its sums nor its largest score.  So its bits do not depend on the batch, on chunks,
or on whether it was a prompt's token.  The scale of keys in FP8 is a factor of the scores', that of values a factor of
the sums of each split.

One program takes a tile: some tokens of a sequence times the query heads of one key/value head.  For many programs it
takes all splits, one after the other.  For few it takes one split, and `merge_kernel` merges.  The arithmetic of both
is the same, in the same kernel.  Tiles have one shape, so that the same matrix instructions serve all lengths.

Shapes: T tokens, H query heads, Hkv key/value heads, G = H / Hkv, D key size, V value size, N tiles, X splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor

SPLIT = 1024
MAX_DEPTH, MAX_VALUES = 128, 128
ENOUGH_PROGRAMS = 512  # every multiprocessor has work then
_LOG2_E = tl.constexpr(1.4426950408889634)
_STAGES, _MERGE_WARPS = 2, 4
_LEAST = 16  # elements that a matrix instruction multiplies


class Shape(NamedTuple):
    """The constants of the kernels for a kind of layer.

    A tile has `tokens` times `heads` rows.  `depth` elements of a key are multiplied at once.  `values` are the value
    elements of a program; a larger value has several programs.
    """

    tokens: int
    heads: int
    head_blocks: int
    block: int
    depth: int
    values: int
    value_blocks: int
    num_warps: int

    @classmethod
    def of(cls, group: int, key_size: int, value_size: int, dtype: torch.dtype) -> Shape:
        """Return the shape for G query heads of a key/value head."""
        rows, block = (16, 32) if dtype == torch.float32 else (64, 64)
        heads = min(triton.next_power_of_2(group), rows)
        depth = max(_LEAST, min(triton.next_power_of_2(key_size), MAX_DEPTH))
        if key_size > depth and key_size % depth:
            depth //= 2  # 576 elements of a latent are nine times 64
        values = max(_LEAST, min(triton.next_power_of_2(value_size), MAX_VALUES))
        return cls(
            rows // heads,
            heads,
            triton.cdiv(group, heads),
            block,
            depth,
            values,
            triton.cdiv(value_size, values),
            8 if key_size > MAX_DEPTH or dtype == torch.float32 else 4,
        )

    @property
    def programs_per_tile(self) -> int:
        return self.head_blocks * self.value_blocks

    def constants(self, group: int, key_size: int, value_size: int) -> dict[str, Any]:
        sizes = {"GROUP": group, "KEY": key_size, "VALUE": value_size, "TOKENS": self.tokens, "HEADS": self.heads}
        blocks = {"HEAD_BLOCKS": self.head_blocks, "VALUE_BLOCKS": self.value_blocks, "BLOCK": self.block}
        return sizes | blocks | {"DEPTH": self.depth, "VALUES": self.values, "SPLIT": SPLIT}


@triton.jit
def first_seen(first_position, WINDOW: tl.constexpr):
    """Return the first position that any token from `first_position` on sees.  WINDOW: 0 for none."""
    if WINDOW == 0:
        return first_position * 0
    return tl.maximum(first_position - (WINDOW - 1), 0)


@triton.jit
def scales_of(one, other):
    """Return the larger of two exponents, and the factors that bring sums at each of them to it.

    An exponent of -inf has the factor 0.
    """
    largest = tl.maximum(one, other)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.exp2(one - base), tl.exp2(other - base)


@triton.jit
def with_sink(largest, total, sink):
    """Return the total with one more score, and the factor of the sums."""
    _, scale, own = scales_of(largest, sink)
    return total * scale + own, scale


@triton.jit(do_not_specialize=["num_splits", "takes_one"])
def attend_kernel(
    q,
    k,
    v,
    sinks,
    table,
    tiles,
    out,
    part_largest,
    part_total,
    part_sums,
    scale,
    value_scale,
    table_row,
    q_token,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    num_splits,
    takes_one,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    VALUES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend with the tokens of a tile to all splits, or to one of them (`takes_one`), which goes to the parts.

    `tiles` [N, 4] int64: row of `table`, first token of the step, number of tokens, position of the first.  Parts are
    float32: the largest score [T, H, X], the total weight [T, H, X] and the weighted sums [T, H, X, V].
    """
    wait_for_predecessor()
    block_of_tile = tl.program_id(0) % (HEAD_BLOCKS * VALUE_BLOCKS)
    tile = tiles + 4 * (tl.program_id(0) // (HEAD_BLOCKS * VALUE_BLOCKS)).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence, first_token = tl.load(tile), tl.load(tile + 1)
    num_tokens, first_position = tl.load(tile + 2), tl.load(tile + 3)
    row = tl.arange(0, TOKENS * HEADS)
    own_token, own_head = row // HEADS, block_of_tile // VALUE_BLOCKS * HEADS + row % HEADS
    is_row = (own_token < num_tokens) & (own_head < GROUP)
    position = first_position + own_token
    token, head = first_token + own_token, kv_head * GROUP + own_head

    dtype: tl.constexpr = q.dtype.element_ty
    element = tl.arange(0, DEPTH)
    own_q = q + token * q_token + head * q_head
    if KEY <= DEPTH:  # else the queries are read again for each block, as they would take too many registers
        queries = tl.load(own_q[:, None] + element[None, :], mask=is_row[:, None] & (element < KEY)[None, :], other=0.0)
    value = block_of_tile % VALUE_BLOCKS * VALUES + tl.arange(0, VALUES)

    begin, end = first_seen(first_position, WINDOW), first_position + num_tokens
    first_split, end_split = begin // SPLIT, tl.cdiv(end, SPLIT)
    if takes_one != 0:
        first_split += tl.program_id(2)
        end_split = tl.minimum(end_split, first_split + 1)
    largest = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * HEADS,), tl.float32)
    sums = tl.zeros((TOKENS * HEADS, VALUES), tl.float32)
    for split in range(first_split, end_split):
        split_largest = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
        split_total = tl.zeros((TOKENS * HEADS,), tl.float32)
        split_sums = tl.zeros((TOKENS * HEADS, VALUES), tl.float32)
        first_block = tl.maximum(split * SPLIT, begin // BLOCK * BLOCK)
        for first in range(first_block, tl.minimum(end, (split + 1) * SPLIT), BLOCK):
            at = first + tl.arange(0, BLOCK)
            is_there = (at >= begin) & (at < end)
            slot = tl.load(table + sequence * table_row + at, mask=is_there, other=0)
            own_k = k + slot * k_slot + kv_head * k_head
            scores = tl.zeros((TOKENS * HEADS, BLOCK), tl.float32)
            for from_element in range(0, KEY, DEPTH):
                e = from_element + element
                if KEY > DEPTH:
                    queries = tl.load(own_q[:, None] + e[None, :], mask=is_row[:, None] & (e < KEY)[None, :], other=0.0)
                keys = tl.load(own_k[None, :] + e[:, None], mask=(e < KEY)[:, None] & is_there[None, :], other=0.0)
                scores = tl.dot(queries, keys.to(dtype), scores, input_precision="ieee")
            is_seen = is_row[:, None] & (at[None, :] <= position[:, None])
            if WINDOW > 0:
                is_seen = is_seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores * scale, float("-inf"))
            split_largest, before, _ = scales_of(split_largest, tl.max(scores, 1))
            base = tl.where(split_largest == float("-inf"), 0.0, split_largest)
            weights = tl.exp2(scores - base[:, None])
            values = tl.load(
                v + slot[:, None] * v_slot + kv_head * v_head + value[None, :],
                mask=is_there[:, None] & (value < VALUE)[None, :],
                other=0.0,
            )
            split_total = split_total * before + tl.sum(weights, 1)
            split_sums = split_sums * before[:, None]
            split_sums = tl.dot(weights.to(dtype), values.to(dtype), split_sums, input_precision="ieee")
        if v.dtype.element_ty == tl.float8e4nv:
            split_sums = split_sums * value_scale
        largest, before, own = scales_of(largest, split_largest)
        total = total * before + split_total * own
        sums = sums * before[:, None] + split_sums * own[:, None]

    inside = is_row[:, None] & (value < VALUE)[None, :]
    line = token * tl.num_programs(1) * GROUP + head
    if takes_one != 0:
        if first_split < end_split:
            part = line * num_splits + tl.program_id(2)
            tl.store(part_largest + part, largest, mask=is_row)
            tl.store(part_total + part, total, mask=is_row)
            tl.store(part_sums + part[:, None] * VALUE + value[None, :], sums, mask=inside)
    else:
        if HAS_SINKS:
            total, before = with_sink(largest, total, tl.load(sinks + head, mask=is_row, other=0.0) * _LOG2_E)
            sums = sums * before[:, None]
        result = tl.div_rn(sums, total[:, None]) + 0.0  # -0 becomes 0
        tl.store(out + line[:, None] * VALUE + value[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    part_largest,
    part_total,
    part_sums,
    sinks,
    tiles,
    out,
    num_splits,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Merge the splits of one head of a decoding token, and write its result.  Tile n has the token n alone."""
    wait_for_predecessor()
    position = tl.load(tiles + 4 * tl.program_id(0).to(tl.int64) + 3)
    head, value = tl.program_id(1), tl.arange(0, BLOCK_V)
    line = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    count = tl.cdiv(position + 1, SPLIT) - first_seen(position, WINDOW) // SPLIT
    largest, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for split in range(count):
        part = line * num_splits + split
        split_sums = tl.load(part_sums + part * VALUE + value, mask=value < VALUE, other=0.0)
        largest, before, own = scales_of(largest, tl.load(part_largest + part))
        total = total * before + tl.load(part_total + part) * own
        sums = sums * before + split_sums * own
    if HAS_SINKS:
        total, before = with_sink(largest, total, tl.load(sinks + head) * _LOG2_E)
        sums = sums * before
    result = tl.div_rn(sums, total) + 0.0
    tl.store(out + line * VALUE + value, result.to(out.dtype.element_ty), mask=value < VALUE)


class Parts(NamedTuple):
    """Room for the parts of decoding tokens, float32: `largest` and `total` [B, H, X], `sums` [B, H, X, V]."""

    largest: torch.Tensor
    total: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of_step(
        cls,
        tokens: int,
        heads: int,
        kv_heads: int,
        value_size: int,
        shape: Shape,
        longest: int,
        window: int | None,
        device: torch.device | str,
    ) -> Parts | None:
        """Make room for decoding `tokens` in sequences of up to `longest`; None where no split has its own programs.

        The choice changes no bit.  On the device "meta" it takes no memory.
        """
        splits = triton.cdiv(longest, SPLIT)
        if window is not None:
            splits = min(splits, triton.cdiv(window, SPLIT) + 1)
        if splits <= 1 or tokens * kv_heads * shape.programs_per_tile >= ENOUGH_PROGRAMS:
            return None
        facts = torch.empty((2, tokens, heads, splits), dtype=torch.float32, device=device)
        sums = torch.empty((tokens, heads, splits, value_size), dtype=torch.float32, device=device)
        return cls(facts[0], facts[1], sums)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


def attend(
    q_THD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    tiles_N4: torch.Tensor,
    out_THV: torch.Tensor,
    shape: Shape,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
    parts: Parts | None = None,
    value_scale: float = 1.0,
) -> None:
    """Attend with the queries of the tiles [N, 4] (see `attend_kernel`) to pools [slots, Hkv, size], into `out`.

    `table` [rows, positions] int64 has the slots.  With `parts` every tile is one token, tile n the token n: programs
    take one split each, of at most as many as there is room for.  `value_scale`: of values in FP8.
    """
    (_, heads, key_size), (_, kv_heads, value_size) = q_THD.shape, v_pool.shape
    assert table.stride(1) == q_THD.stride(2) == k_pool.stride(2) == v_pool.stride(2) == 1 and out_THV.is_contiguous()
    splits = 1 if parts is None else parts.largest.shape[2]
    room = (out_THV,) * 3 if parts is None else parts
    limits: dict[str, Any] = {"WINDOW": window or 0, "HAS_SINKS": sinks_H is not None}
    sinks = q_THD if sinks_H is None else sinks_H
    attend_kernel[(tiles_N4.shape[0] * shape.programs_per_tile, kv_heads, splits)](
        q_THD,
        k_pool,
        v_pool,
        sinks,
        table,
        tiles_N4,
        out_THV,
        *room,
        scale * _LOG2_E.value,
        value_scale,
        table.stride(0),
        *q_THD.stride()[:2],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        splits,
        int(parts is not None),
        **limits,
        **shape.constants(heads // kv_heads, key_size, value_size),
        num_warps=shape.num_warps,
        num_stages=_STAGES,
        enable_fp_fusion=False,
        **launch_options(q_THD),
    )
    if parts is not None:
        merge_kernel[(tiles_N4.shape[0], heads)](
            *parts,
            sinks,
            tiles_N4,
            out_THV,
            splits,
            **limits,
            VALUE=value_size,
            BLOCK_V=triton.next_power_of_2(value_size),
            SPLIT=SPLIT,
            num_warps=_MERGE_WARPS,
            enable_fp_fusion=False,
            **launch_options(out_THV),
        )


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for Qwen3, GPT-OSS and DeepSeek-V3 in bfloat16, Qwen3 in float32, and the merge."""
    cases: list[tuple[Any, ...]] = []
    numbers = ("table_row", "q_token", "q_head", "k_slot", "k_head", "v_slot", "v_head", "num_splits", "takes_one")
    parts = {"part_largest": "*fp32", "part_total": "*fp32", "part_sums": "*fp32"}
    for name, group, key, value, dtype, stored, window in (
        ("Qwen3", 8, 128, 128, "bf16", "bf16", 0),
        ("Qwen3, KV in fp8", 8, 128, 128, "bf16", "fp8e4nv", 0),
        ("Qwen3-Next", 8, 256, 256, "bf16", "bf16", 0),
        ("GPT-OSS", 8, 64, 64, "bf16", "bf16", 128),
        ("DeepSeek-V3", 128, 576, 512, "bf16", "bf16", 0),
        ("Qwen3", 8, 128, 128, "fp32", "fp32", 0),
    ):
        of = torch.float32 if dtype == "fp32" else torch.bfloat16
        shape = Shape.of(group, key, value, of)
        signature = dict.fromkeys(("q", "sinks", "out"), f"*{dtype}") | dict.fromkeys(("k", "v"), f"*{stored}")
        signature |= (
            parts
            | {"table": "*i64", "tiles": "*i64", "scale": "fp32"}
            | {"value_scale": "fp32"}
            | dict.fromkeys(numbers, "i32")
        )
        limits = {"WINDOW": window, "HAS_SINKS": window > 0}
        constants = limits | shape.constants(group, key, value)
        cases.append((f"fixed attention {name} {dtype}", attend_kernel, signature, constants, shape.num_warps, _STAGES))
    signature = parts | {"sinks": "*bf16", "tiles": "*i64", "out": "*bf16", "num_splits": "i32"}
    constants = {"WINDOW": 0, "HAS_SINKS": False, "VALUE": 128, "BLOCK_V": 128, "SPLIT": SPLIT}
    cases.append(("fixed attention, merge bf16", merge_kernel, signature, constants, _MERGE_WARPS, 3))
    return cases

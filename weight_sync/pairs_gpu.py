"""`take_pairs` on a CUDA device: one Triton kernel with the tables on the device.

A program takes a block of 128 rows and columns of a weight, 32 rows at a time.  Whatever shares a scale lies in one
block.  It makes the values, sums all parts and the values that are held, and writes what is held:

    as sent    values | FP8, elements and scales | INT4, words, scales and shape
    as held    values, in boxes | rows of FP8 or INT4 with their scales (`MoveKind`)

A block that is quantised to FP8 is read twice, for its scale and for its elements; all else is read and written once.
With `live` storages it writes the exclusive or with what lies there, as `spans_gpu` does.

Weights of one form are one launch.  Forms differ in how weights come and are held, and in dtypes and groups; parts that
do not lie at multiples of their width are read byte by byte.

`GpuPairs` keeps checked tables on the device.  Interpreted, the kernel leaves the bits that single tensors leave; it
has **not run** on a device.

Shapes: Q weights, M moves, S storages, R rows and C columns of a tile, G groups that have a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weight_sync.fingerprint import EXPONENTS
from weight_sync.fingerprint_words import multipliers
from weight_sync.moves import ROW_KINDS
from weight_sync.pair_kernels import (
    add,
    check_parts,
    coefficients,
    fp8_codes,
    fp8_values,
    mark,
    quantised_to_groups,
    read_scales,
    read_tile,
    rounded,
    sum_words,
    write_box,
    write_fp8_rows,
    write_int4_rows,
)
from weight_sync.pair_tables import PAIR_COLUMNS, PairForm, PairRow, checked_pairs
from weight_sync.spans import MOVE_COLUMNS, SpanMove
from weight_sync.spans_gpu import WORDS, DeviceTables, bits_of, on_device, values_of
from weight_sync.tensor_meta import DTYPES

TILE = 128
_ROWS = 32
_NUM_WARPS = 16
_SUMS = 4
Found = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _take(
    source,
    pairs,
    moves,
    first_move,
    storages,
    lives,
    work,
    table,
    sums,
    wrong,
    FORM: tl.constexpr,
    SENT: tl.constexpr,
    VALUES: tl.constexpr,
    HELD: tl.constexpr,
    GROUP: tl.constexpr,
    HELD_GROUP: tl.constexpr,
    IN_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    SENT_MASK: tl.constexpr,
    VALUE_WORD: tl.constexpr,
    VALUE_MASK: tl.constexpr,
    CHECKS: tl.constexpr,
    WRITES: tl.constexpr,
    FOLDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take a block of a weight; forms are `PairForm`, and -1 as held: as it came."""
    item = work + tl.program_id(0).to(tl.int64) * 3
    weight, first_row, first_column = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    pair, sums, wrong = pairs + weight * 11, sums + weight * 4, wrong + weight
    rows, columns = tl.load(pair + 6), tl.load(pair + 7)
    column = (first_column + tl.arange(0, TILE))[None, :]
    if CHECKS and FORM != 0:
        check_parts(
            source, pair, first_row, first_column, table, sums, wrong, FORM, SENT, WORD, WIDTH, GROUP, ALIGNED, TILE
        )
    scale = tl.full((1, 1), 1.0, tl.float32)
    if HELD == 1:
        largest = tl.zeros((1, 1), tl.float32)
        for down in range(0, TILE, ROWS):
            row = (first_row + down + tl.arange(0, ROWS))[:, None]
            is_there = (row < rows) & (column < columns)
            _, value = read_tile(source, pair, row, column, is_there, FORM, SENT, VALUES, WORD, WIDTH, GROUP, ALIGNED)
            found = tl.max(tl.where(is_there, tl.abs(value), 0.0), 1, keep_dims=True)
            largest = tl.maximum(largest, tl.max(found, 0, keep_dims=True))
        scale = tl.div_rn(largest, 448.0)
        scale = tl.where(scale > 0.0, scale, 1.0)
    elif HELD == -1 and FORM == 1:
        at = tl.zeros((1, 1), tl.int64)
        scale_word = read_scales(
            source, pair, at + first_row, at + first_column, at == 0, FORM, WORD, WIDTH, GROUP, ALIGNED
        )
        scale = values_of(scale_word, SENT).to(tl.float32)
    for down in range(0, TILE, ROWS):
        row = (first_row + down + tl.arange(0, ROWS))[:, None]
        is_there = (row < rows) & (column < columns)
        sent, value = read_tile(source, pair, row, column, is_there, FORM, SENT, VALUES, WORD, WIDTH, GROUP, ALIGNED)
        element, held = sent, value
        groups = tl.zeros((ROWS, TILE // 32), tl.uint16)
        if HELD == 1:
            element = fp8_codes(tl.div_rn(value, scale))
            held = rounded(fp8_values(element) * scale, VALUES)
        elif HELD == 2:
            element, of_groups, held = quantised_to_groups(tl.where(is_there, value, 0.0), HELD_GROUP, ROWS, TILE)
            groups, held = tl.broadcast_to(of_groups, (ROWS, TILE // 32)), rounded(held, VALUES)
        elif HELD == -1 and FORM == 2:
            of_group = first_column + 32 * tl.arange(0, TILE // 32)[None, :]
            is_group = (row < rows) & (of_group < columns)
            groups = read_scales(source, pair, row, of_group, is_group, FORM, WORD, WIDTH, GROUP, ALIGNED)
        word = bits_of(held, VALUES)
        if CHECKS:
            coefficient = coefficients(row * columns + first_column, tl.arange(0, TILE)[None, :], table)
            if FORM == 2:
                sum_words(source, pair, row, first_column, rows, columns, table, sums, ALIGNED, TILE)
            else:
                add(sums, sent, is_there, coefficient)
            add(sums + 3, word, is_there, coefficient)
            came = bits_of(value, VALUES)
            is_wrong = ((word & VALUE_MASK) == VALUE_MASK) | ((came & VALUE_MASK) == VALUE_MASK)
            if FORM == 0:
                is_wrong = is_wrong | ((sent & SENT_MASK) == SENT_MASK)
            mark(wrong, is_there & is_wrong, 1)
        if WRITES:
            for number in range(tl.load(first_move + weight), tl.load(first_move + weight + 1)):
                move = moves + number * 11
                storage = tl.load(storages + tl.load(move + 2)) + tl.load(move + 3)
                live = tl.load(lives + tl.load(move + 2)) + tl.load(move + 3)
                if not IN_ROWS:
                    write_box(move, storage, live, row, column, is_there, word, VALUE_WORD, FOLDS)
                elif HELD == 1 or (FORM == 1 and HELD == -1):
                    bits = scale.to(tl.uint32, bitcast=True)
                    write_fp8_rows(move, storage, live, row, first_column, element, bits, FOLDS, TILE)
                else:
                    write_int4_rows(
                        move, storage, live, row, first_column, element, groups, HELD_GROUP, FOLDS, ROWS, TILE
                    )


class PairKernel(NamedTuple):
    """Weights of one compiled kernel: `PairRow`'s fields, how they are written, and how their parts lie.

    `held`: -1 where a weight is held as it came, in its parts or as values.
    """

    form: int
    sent: int
    values: int
    held: int
    group: int
    held_group: int
    in_rows: bool
    is_aligned: bool

    @classmethod
    def of(cls, row: PairRow, in_rows: bool, phase: int) -> PairKernel:
        """Return the kernel of a weight.  `phase`: the address of the bucket, in bytes from a multiple of 8."""
        is_kept = row.held == PairForm.VALUES or row.form == row.held
        width = list(DTYPES.values())[row.sent].itemsize
        parts = {
            PairForm.VALUES: [(row.offset, width)],
            PairForm.FP8: [(row.scales, width)],
            PairForm.INT4: [(row.offset, 4), (row.scales, 2), (row.shape, width)],
        }[PairForm(row.form)]
        is_aligned = all((phase + offset) % width == 0 for offset, width in parts)
        held_group = row.held_group if row.held == PairForm.INT4 else 32
        group = row.group if row.form == PairForm.INT4 else 32
        held = -1 if is_kept else int(row.held)
        return cls(int(row.form), row.sent, row.values, held, group, held_group, in_rows, is_aligned)

    def constants(self, checks: bool, writes: bool, folds: bool) -> dict[str, Any]:
        """Return the constants of a launch."""
        dtypes = list(DTYPES.values())
        sent, values = dtypes[self.sent], dtypes[self.values]
        return {
            "FORM": self.form,
            "SENT": self.sent,
            "VALUES": self.values,
            "HELD": self.held,
            "GROUP": self.group,
            "HELD_GROUP": self.held_group,
            "IN_ROWS": self.in_rows,
            "ALIGNED": self.is_aligned,
            "WORD": WORDS[sent.itemsize],
            "WIDTH": sent.itemsize,
            "SENT_MASK": EXPONENTS.get(sent, 0),
            "VALUE_WORD": WORDS[values.itemsize],
            "VALUE_MASK": EXPONENTS[values],
            "CHECKS": checks,
            "WRITES": writes,
            "FOLDS": folds,
            "ROWS": _ROWS,
            "TILE": TILE,
        }


class GpuPairs(DeviceTables):
    """The two tables of `take_pairs` on a device, checked; see `DeviceTables`."""

    def __init__(
        self, source: torch.Tensor, pairs: torch.Tensor, moves: torch.Tensor, storages: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(source, storages)
        rows, steps = checked_pairs(source, pairs, moves, storages)
        steps.sort(key=lambda step: step.tensor)
        counts_Q = torch.zeros(len(rows) + 1, dtype=torch.int64)
        for step in steps:
            counts_Q[step.tensor + 1] += 1
        self._num_weights = len(rows)
        self._pairs = on_device(self.device, rows, PAIR_COLUMNS)
        self._moves = on_device(self.device, steps, MOVE_COLUMNS)
        self._first_move = counts_Q.cumsum(0).to(self.device)
        work = work_of(rows, steps, source.data_ptr() % 8)
        self._work = {kernel: on_device(self.device, items, 3) for kernel, items in work.items()}

    def take(
        self,
        source: torch.Tensor,
        storages: Sequence[torch.Tensor],
        checks: bool = True,
        writes: bool = True,
        live: Sequence[torch.Tensor] | None = None,
    ) -> Found:
        """Take a bucket; return sums int64 [Q, 4], which wrapped, and flags int32 [Q], on the device.

        `live`, and what is raised: see `GpuSpans.take`.
        """
        self.require_fit(source, storages, live)
        sums_Q4 = torch.zeros(self._num_weights, _SUMS, dtype=torch.int64, device=self.device)
        wrong_Q = torch.zeros(self._num_weights, dtype=torch.int32, device=self.device)
        addresses = self.addresses_of(storages, storages if live is None else live)
        # Triton launches on the current device, and the bucket may lie on another.
        with torch.cuda.device(source.device) if source.is_cuda else nullcontext():
            for kernel, items in self._work.items() if checks or writes else ():
                _take[(items.shape[0],)](
                    source, self._pairs, self._moves, self._first_move, *addresses, items,
                    multipliers(str(source.device)), sums_Q4, wrong_Q,
                    **kernel.constants(checks, writes, live is not None),
                    num_warps=_NUM_WARPS, enable_fp_fusion=False,
                )  # fmt: skip
        return sums_Q4, wrong_Q


def work_of(
    rows: Sequence[PairRow], steps: Sequence[SpanMove], phase: int
) -> dict[PairKernel, list[tuple[int, int, int]]]:
    """Return the items of each kernel: weight, first row, first column."""
    in_rows = {step.tensor for step in steps if step.kind in ROW_KINDS}
    found: dict[PairKernel, list[tuple[int, int, int]]] = {}
    for number, row in enumerate(rows):
        items = found.setdefault(PairKernel.of(row, number in in_rows, phase), [])
        items += [(number, r, c) for r in range(0, row.rows, TILE) for c in range(0, row.columns, TILE)]
    return {kernel: items for kernel, items in found.items() if items}


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, object], int, int]]:
    """Return the forms in which weights mostly come and are held, and one of each other path of the kernel."""
    arguments = ("pairs", "moves", "first_move", "storages", "lives", "work", "table", "sums")
    types = {"source": "*u8", **dict.fromkeys(arguments, "*i64"), "wrong": "*i32"}
    code = list(DTYPES).index
    bf16, f32, i64 = code("bfloat16"), code("float32"), code("int64")
    values, fp8, int4 = (int(form) for form in (PairForm.VALUES, PairForm.FP8, PairForm.INT4))
    both = ("checks", "writes")
    forms = {
        "fp8_as_fp8": PairKernel(fp8, f32, bf16, -1, 32, 32, True, True),
        "fp8_as_int4": PairKernel(fp8, f32, bf16, int4, 32, 32, True, True),
        "fp8_as_bfloat16": PairKernel(fp8, f32, bf16, -1, 32, 32, False, True),
        "int4_as_int4": PairKernel(int4, i64, bf16, -1, 32, 32, True, True),
        "int4-128_as_int4-128": PairKernel(int4, i64, bf16, -1, 128, 128, True, True),
        "int4_as_fp8": PairKernel(int4, i64, bf16, fp8, 32, 32, True, True),
        "int4_as_bfloat16": PairKernel(int4, i64, bf16, -1, 32, 32, False, True),
        "bfloat16_as_fp8": PairKernel(values, bf16, bf16, fp8, 32, 32, True, True),
        "bfloat16_as_int4": PairKernel(values, bf16, bf16, int4, 32, 32, True, True),
        "bfloat16_as_int4-128": PairKernel(values, bf16, bf16, int4, 32, 128, True, True),
        "bfloat16_as_values_of_fp8": PairKernel(values, bf16, bf16, fp8, 32, 32, False, True),
        "float32_as_fp8": PairKernel(values, f32, bf16, fp8, 32, 32, True, True),
    }
    hows: dict[str, tuple[PairKernel, tuple[str, ...]]] = {name: (form, both) for name, form in forms.items()}
    for name in ("fp8_as_fp8", "bfloat16_as_fp8", "bfloat16_as_int4", "int4_as_int4"):
        hows[f"{name}_folded"] = forms[name], (*both, "folds")
    hows["int4_as_int4_unaligned"] = forms["int4_as_int4"]._replace(is_aligned=False), both
    hows["fp8_as_fp8_checked_only"] = forms["fp8_as_fp8"], ("checks",)
    hows["fp8_as_fp8_unchecked"] = forms["fp8_as_fp8"], ("writes",)
    steps = ("checks", "writes", "folds")
    return [
        (f"pairs_{name}", _take, types, form.constants(*(step in how for step in steps)), _NUM_WARPS, 1)
        for name, (form, how) in hows.items()
    ]

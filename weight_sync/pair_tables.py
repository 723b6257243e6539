"""The table of weights of `take_pairs`, and the checks of both of its tables for a device.

What points outside, or would be read as something else, is refused.  `rollout/kernels/csrc/take_pairs.cpp` checks them
for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from weight_sync.moves import ROW_KINDS, MoveKind
from weight_sync.pair_kinds import GROUPS
from weight_sync.spans import (
    CAST_DTYPES,
    MOVE_COLUMNS,
    SpanMove,
    SpanTensor,
    check_bytes,
    check_move,
    require,
    rows_of,
)
from weight_sync.tensor_meta import DTYPES


class PairForm(IntEnum):
    """The forms in which a weight comes and is held; in `INT8` (`weight_sync.int8_blocks`) it never comes."""

    VALUES = 0
    FP8 = 1
    INT4 = 2
    INT8 = 3


class PairRow(NamedTuple):
    """A row of the table of weights; all parts are dense and row-major.

    `offset`, `scales`, `shape`: bytes of the source at which the parts begin.  `sent`: the dtype (`DTYPE_CODES`) of
    values, of scales of FP8, of the shape of INT4.  `group`: elements that share a scale of INT4.  `rows`, `columns`:
    of the weight.  `values`: the model's dtype.  `held_group`: the same of INT4 that is held.
    """

    offset: int
    form: PairForm
    sent: int
    scales: int
    shape: int
    group: int
    rows: int
    columns: int
    values: int
    held: PairForm
    held_group: int


PAIR_COLUMNS = len(PairRow._fields)
_FORMS = (PairForm.VALUES, PairForm.FP8, PairForm.INT4)
_MOST = 1 << 31  # rows and columns
_TILE = 128  # columns of which a row's elements and scales lie together
_ROW_ALIGNMENT = 32


def checked_pairs(
    source: torch.Tensor, pairs: torch.Tensor, moves: torch.Tensor, storages: Sequence[torch.Tensor]
) -> tuple[list[PairRow], list[SpanMove]]:
    """Return the rows of both tables.  Raises `RuntimeError` for one that does not fit."""
    check_bytes(source, storages)
    rows = [PairRow._make(row) for row in rows_of(pairs, PAIR_COLUMNS, "pair")]
    steps = [SpanMove(*row) for row in rows_of(moves, MOVE_COLUMNS, "move")]
    for number, row in enumerate(rows):
        _check_pair(row, f"pair {number}", source.numel())
    spans = [SpanTensor.whole(0, row.values, row.values, row.rows, row.columns, row.columns, 1) for row in rows]
    kinds: dict[int, bool] = {}
    for number, step in enumerate(steps):
        require(step.tensor < len(rows), f"move {number} has no tensor")
        if step.kind in ROW_KINDS:
            _check_rows(step, f"move {number}", rows[step.tensor], storages)
        else:
            check_move(step, f"move {number}", spans, storages)
        is_alike = kinds.setdefault(step.tensor, step.kind in ROW_KINDS) == (step.kind in ROW_KINDS)
        require(is_alike, f"move {number} has another kind than one before")
    return rows, steps


def _check_pair(row: PairRow, name: str, source_bytes: int) -> None:
    dtypes = list(DTYPES.values())
    require(row.form in _FORMS and row.held in _FORMS, f"{name} has an unknown form")
    require(row.values < len(CAST_DTYPES), f"{name} has values of dtype {row.values}")
    sent = dtypes[row.sent] if row.sent < len(dtypes) else None
    allowed = {
        PairForm.VALUES: CAST_DTYPES,
        PairForm.FP8: CAST_DTYPES[1:],
        PairForm.INT4: (torch.int64, torch.int32),
    }[PairForm(row.form)]
    require(sent in allowed, f"{name} has parts of dtype {row.sent}")
    assert sent is not None
    require(max(row.rows, row.columns) < _MOST, f"{name} is too large")
    comes_in_groups = row.form != PairForm.INT4 or (row.group in GROUPS and row.columns % row.group == 0)
    holds_groups = row.held != PairForm.INT4 or row.held_group in GROUPS
    is_regrouped = row.form != row.held or row.form != PairForm.INT4 or row.group % row.held_group == 0
    is_right = comes_in_groups and holds_groups and is_regrouped
    require(is_right, f"{name} has groups of {row.group} and {row.held_group}")
    for end in _ends(row, sent.itemsize):
        require(end <= source_bytes, f"{name} lies outside of the source")


def _ends(row: PairRow, width: int) -> list[int]:
    """Return where the parts of a weight end."""
    if row.form == PairForm.VALUES:
        return [row.offset + row.rows * row.columns * width]
    if row.form == PairForm.FP8:
        blocks = -(-row.rows // _TILE) * -(-row.columns // _TILE)
        return [row.offset + row.rows * row.columns, row.scales + blocks * width]
    words, scales = row.rows * row.columns // 2, row.rows * (row.columns // row.group) * torch.bfloat16.itemsize
    return [row.offset + words, row.scales + scales, row.shape + 2 * width]


def _check_rows(step: SpanMove, name: str, row: PairRow, storages: Sequence[torch.Tensor]) -> None:
    """Check a move to rows of elements and scales: `a` bytes each, of which `b` come before the scales."""
    require(step.storage < len(storages), f"{name} has no storage")
    is_fp8 = step.kind == MoveKind.ROWS_FP8
    require(row.held == (PairForm.FP8 if is_fp8 else PairForm.INT4), f"{name} has rows of another form")
    is_inside = step.first_row + step.num_rows <= row.rows and step.first_column + step.num_columns <= row.columns
    require(is_inside, f"{name} lies outside of its tensor")
    cuts = step.first_column % _TILE != 0 or (is_fp8 and step.first_row % _TILE != 0)
    require(not cuts, f"{name} begins inside a block")
    elements, scales = _row_parts(step.num_columns, is_fp8)
    require(step.b == elements and step.a >= elements + scales, f"{name} has rows of another layout")
    storage = storages[step.storage]
    is_aligned = step.a % _ROW_ALIGNMENT == 0 and (storage.data_ptr() + step.offset) % torch.float32.itemsize == 0
    require(is_aligned, f"{name} has a destination between two elements")
    end = step.offset + (step.num_rows - 1) * step.a + elements + scales if step.num_rows else 0
    require(end <= storage.numel(), f"{name} lies outside of its storage")


def _row_parts(columns: int, is_fp8: bool) -> tuple[int, int]:
    """Return the bytes of a row up to its scales, and of the scales (`rollout/kernels/row_places.py`)."""
    if is_fp8:
        return -(-columns // 16) * 16, -(-columns // _TILE) * torch.float32.itemsize
    steps = -(-columns // 64)
    return steps * 32, steps * 2 * torch.bfloat16.itemsize

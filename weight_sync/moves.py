"""`Move`: one box of a logical tensor on its way into a storage, as `weight_sync.spans` takes it.

A logical tensor is read as a matrix: its first `lead` dimensions are the rows, the others the columns (`matrix_of`).  A
place returns moves for it, and each move is a row of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch


class MoveKind(IntEnum):
    """The layout that a move writes.

    BOX: the element in row r and column c of the box goes to destination + r * a + c * b, in elements of its dtype.
    PACKED: the rows, whole, go into a packed matrix of the compiled operators, which begins at the destination: a is
    the first packed row, b the step and c the offset of `pack_rows`.
    PACKED_W8: the same with `pack_rows_w8`, for a tensor that is held in blocks of 8 bits (`weight_sync.int8_blocks`).
    PACKED_TRANSPOSED: as PACKED, the columns of the box as packed rows.
    PACKED_FP8, PACKED_INT4: elements and scales go as with `pack_rows_fp8` and `pack_rows_int4` (`take_pairs`).
    ROWS_FP8, ROWS_INT4: whole rows of `rollout.kernels.row_places`, from the destination on: a is the number of bytes
    from one to the next, b the number of bytes up to its scales.
    """

    BOX = 0
    PACKED = 1
    PACKED_W8 = 2
    PACKED_TRANSPOSED = 3
    PACKED_FP8 = 4
    PACKED_INT4 = 5
    ROWS_FP8 = 6
    ROWS_INT4 = 7


ROW_KINDS = (MoveKind.ROWS_FP8, MoveKind.ROWS_INT4)


class Move(NamedTuple):
    """One box of a matrix, and where it goes: byte `offset` of the untyped storage of `storage`."""

    kind: MoveKind
    storage: torch.Tensor
    offset: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    a: int
    b: int
    c: int = 0

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns

    def cut(self, rows: range, columns: range) -> Move | None:
        """Return the move of these rows and columns of the matrix alone; None where that is none of its kind."""
        top, left = max(self.first_row, rows.start), max(self.first_column, columns.start)
        num_rows = max(0, min(self.first_row + self.num_rows, rows.stop) - top)
        num_columns = max(0, min(self.first_column + self.num_columns, columns.stop) - left)
        part = self._replace(first_row=top, num_rows=num_rows, first_column=left, num_columns=num_columns)
        down, right = top - self.first_row, left - self.first_column
        if part.num_elements == 0:
            return part
        if self.kind == MoveKind.BOX:
            return part._replace(offset=self.offset + (down * self.a + right * self.b) * self.storage.itemsize)
        if self.kind in ROW_KINDS:
            return part._replace(offset=self.offset + down * self.a) if num_columns == self.num_columns else None
        if self.kind == MoveKind.PACKED_TRANSPOSED:
            return part._replace(a=self.a + right) if num_rows == self.num_rows else None
        return part._replace(a=self.a + down) if num_columns == self.num_columns else None

    def shifted(self, rows: int, columns: int) -> Move:
        """Return the move of the box that lies so much further down and right in the matrix."""
        return self._replace(first_row=self.first_row + rows, first_column=self.first_column + columns)


def packed_move(
    kind: MoveKind, packed: torch.Tensor, rows: int, columns: int, first: int = 0, step: int = 1, offset: int = 0
) -> Move:
    """Return the move of a whole matrix into packed rows from `first` on of one that begins where `packed` does."""
    begin = int(packed.storage_offset()) * packed.itemsize
    return Move(kind, packed, begin, 0, rows, 0, columns, first, step, offset)


def matrix_of(shape: Sequence[int], lead: int = 1) -> tuple[int, int]:
    """Return rows and columns of a tensor that is read as a matrix."""
    return math.prod(shape[:lead]), math.prod(shape[lead:])


def lead_of(dim: int | None) -> int:
    """Return how many dimensions are rows where a region of dimension `dim` is moved, or a whole tensor (None)."""
    return max(dim or 0, 1)


def two_strides(sizes: Sequence[int], strides: Sequence[int], lead: int = 1) -> tuple[int, int] | None:
    """Return the strides of rows and of columns of a view that is read as a matrix; None where it has more than two."""
    row = _one_stride(zip(sizes[:lead], strides[:lead], strict=True))
    column = _one_stride(zip(sizes[lead:], strides[lead:], strict=True))
    return None if row is None or column is None else (row, column)


def _one_stride(dimensions: Iterable[tuple[int, int]]) -> int | None:
    """Return the stride of dimensions (sizes, strides) that are gone through in order; None where it changes."""
    found, length = None, 1
    for size, stride in reversed(list(dimensions)):
        if size == 1:
            continue
        if found is None:
            found = stride
        elif stride != found * length:
            return None
        length *= size
    return 1 if found is None else found

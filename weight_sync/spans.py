"""The two tables by which `take_spans` takes a bucket to where its tensors live, and their checks.

* `tensors`: int64 [T, 11], of each tensor: byte offset in the source, dtype as sent and as held (`DTYPE_CODES`), rows,
  columns, stride of rows and of columns in elements, and the box of it that the source has, which begins at the offset:
  first row, number of rows, first column, number of columns.  A logical tensor is read as a matrix, whose row-major
  order is the tensor's own; a piece of a wire tensor that is transposed or interleaved differs in strides alone.
* `moves`: int64 [M, 11], of each `Move`: tensor, kind, storage (index in a list), and its other fields in order.

Moves lie in the tensor, not in its box: what the box has of a move is written.  The fingerprint of a box is its share
of the tensor's, and shares of boxes that make up a tensor add up.

Values are cast between the first four of `DTYPES` as torch's `.to` casts them.  Two moves of one call must not write
the same bytes.

Shapes: T tensors, M moves, R rows, C columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weight_sync.moves import Move, MoveKind
from weight_sync.tensor_meta import DTYPES

DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(DTYPES.values())}
INT8_BLOCKS_CODE = len(DTYPE_CODES)
"""The dtype as held of bfloat16 that is rounded to `weight_sync.int8_blocks`; its fingerprint is of those values."""
CAST_DTYPES = tuple(DTYPES.values())[:4]
"""Dtypes that are cast to one another; any other is held as it is sent."""
TENSOR_COLUMNS = 11
MOVE_COLUMNS = 11
_LIMIT = 1 << 48


class SpanTensor(NamedTuple):
    """A row of the table of tensors."""

    offset: int
    sent: int
    held: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int

    @classmethod
    def whole(
        cls, offset: int, sent: int, held: int, rows: int, columns: int, row_stride: int, column_stride: int
    ) -> SpanTensor:
        """Return the row of a tensor of which the source has everything."""
        return cls(offset, sent, held, rows, columns, row_stride, column_stride, 0, rows, 0, columns)

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows and columns of the box."""
        return self.num_rows, self.num_columns


class SpanMove(NamedTuple):
    """A row of the table of moves."""

    tensor: int
    kind: int
    storage: int
    offset: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    a: int
    b: int
    c: int

    @staticmethod
    def of(move: Move, tensor: int, storage: int) -> SpanMove:
        """Return the row of a move of tensor number `tensor` into storage number `storage`."""
        return SpanMove(tensor, int(move.kind), storage, *move[2:])


def table_of(rows: Sequence[Sequence[int]], columns: int) -> torch.Tensor:
    """Return rows of integers as int64 [rows, columns].  Raises `ValueError` for rows of another length.

    It is made by numpy, element by element: `torch.tensor` takes ten times as long.
    """
    if any(len(row) != columns for row in rows):
        raise ValueError(f"a row has not {columns} columns")
    elements = itertools.chain.from_iterable(rows)
    return torch.from_numpy(np.fromiter(elements, np.int64, len(rows) * columns).reshape(len(rows), columns))


def checked_tables(
    source: torch.Tensor, tensors: torch.Tensor, moves: torch.Tensor, storages: Sequence[torch.Tensor]
) -> tuple[list[SpanTensor], list[SpanMove]]:
    """Return the rows of both tables.  Raises `RuntimeError`, as the kernel does, for one that does not fit."""
    check_bytes(source, storages)
    spans = [SpanTensor(*row) for row in rows_of(tensors, TENSOR_COLUMNS, "tensor")]
    steps = [SpanMove(*row) for row in rows_of(moves, MOVE_COLUMNS, "move")]
    for index, span in enumerate(spans):
        _check_tensor(span, f"tensor {index}", source.numel())
    for index, step in enumerate(steps):
        check_move(step, f"move {index}", spans, storages)
    return spans, steps


def check_bytes(source: torch.Tensor, storages: Sequence[torch.Tensor]) -> None:
    """Raise `RuntimeError` unless all are bytes on one device."""
    for content in (source, *storages):
        require(content.dim() == 1 and content.dtype == torch.uint8 and content.is_contiguous(), "bytes must be uint8")
        require(content.device == source.device, f"a storage is on {content.device}, its source on {source.device}")


def rows_of(table: torch.Tensor, columns: int, name: str) -> Iterator[list[int]]:
    """Yield the rows of a table.  Raises `RuntimeError` for another shape, and for a number that no table has."""
    is_table = table.dim() == 2 and table.shape[1] == columns and table.dtype == torch.int64
    require(is_table, f"the table of {name}s must be int64 [rows, {columns}]")
    for index, row in enumerate(table.tolist()):
        for number in row:
            require(0 <= number < _LIMIT, f"{name} {index} has the number {number}")
        yield row


def _check_tensor(span: SpanTensor, name: str, source_bytes: int) -> None:
    dtypes = list(DTYPES.values())
    require(max(span.sent, span.held) < len(dtypes), f"{name} has an unknown dtype")
    is_cast = span.sent == span.held or max(span.sent, span.held) < len(CAST_DTYPES)
    require(is_cast, f"{name} would be cast from dtype {span.sent} to {span.held}")
    require(span.rows * span.columns < _LIMIT, f"{name} is too large")
    is_inside = span.first_row + span.num_rows <= span.rows and span.first_column + span.num_columns <= span.columns
    require(is_inside, f"{name} has a box outside of it")
    end = _end(span.offset, dtypes[span.sent].itemsize, span.sizes, span[5:7])
    require(end <= source_bytes, f"{name} lies outside of the source")


def check_move(step: SpanMove, name: str, spans: Sequence[SpanTensor], storages: Sequence[torch.Tensor]) -> None:
    """Raise `RuntimeError` for a move that is not of a box, or points outside."""
    require(step.tensor < len(spans), f"{name} has no tensor")
    require(step.storage < len(storages), f"{name} has no storage")
    require(step.kind == MoveKind.BOX, f"{name} has an unknown kind")
    span, storage = spans[step.tensor], storages[step.storage]
    is_inside = step.first_row + step.num_rows <= span.rows and step.first_column + step.num_columns <= span.columns
    require(is_inside, f"{name} lies outside of its tensor")
    width = list(DTYPES.values())[span.held].itemsize
    require((storage.data_ptr() + step.offset) % width == 0, f"{name} has a destination between two elements")
    end = _end(step.offset, width, (step.num_rows, step.num_columns), (step.a, step.b))
    require(end <= storage.numel(), f"{name} lies outside of its storage")


def _end(offset: int, width: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in sizes:
        return 0
    return offset + (sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1) * width


def require(holds: bool, message: str) -> None:
    """Raise `RuntimeError` unless something holds."""
    if not holds:
        raise RuntimeError(message)

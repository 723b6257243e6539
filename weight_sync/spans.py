"""`torch.ops.weight_sync.take_spans`: a bucket is taken to where its tensors live by two tables, in one pass.

    take_spans(source, tensors, moves, storages, multipliers, checks, writes) -> fingerprints, infinite

* `source`: uint8 [bytes], the bucket or one message of it.
* `tensors`: int64 [T, 7], of each tensor: byte offset in the source, dtype as sent and as held (`DTYPE_CODES`), rows,
  columns, stride of rows and of columns in elements.  A logical tensor is read as a matrix, whose row-major order is
  the tensor's own; a piece of a wire tensor that is transposed or interleaved differs in strides alone.
* `moves`: int64 [M, 11], of each `Move`: tensor, kind, storage (index in `storages`), and its other fields in order.
* `storages`: uint8 [bytes] each, whole storages or their shadows.
* `multipliers`: `fingerprint_words.multipliers`.
* Returned: int64 [T, 2], the fingerprints of the values as sent and as held, as 64-bit integers that wrapped; and
  bool [T, 2], whether one of them is not finite.  Without `checks` both are zeros, and nothing is read for them.
  Without `writes` nothing is written.

Values are cast between the first four of `DTYPES` as torch's `.to` casts them.  Every number of both tables is checked
before anything is written.  Two moves of one call must not write the same bytes.

`take_spans_plainly` is the operator in plain torch.  It knows `MoveKind.BOX` alone.  An engine registers a compiled
form for the CPU (`rollout/kernels/csrc/take_spans.cpp`), which knows all kinds.

Shapes: T tensors, M moves, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from weight_sync.fingerprint import EXPONENTS, fingerprint
from weight_sync.fingerprint_words import SIGNED, signed
from weight_sync.moves import Move, MoveKind
from weight_sync.tensor_meta import DTYPES

DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(DTYPES.values())}
CAST_DTYPES = tuple(DTYPES.values())[:4]
"""Dtypes that are cast to one another; any other is held as it is sent."""
TENSOR_COLUMNS = 7
MOVE_COLUMNS = 11
_LIMIT = 1 << 48

Found = tuple[torch.Tensor, torch.Tensor]


class SpanTensor(NamedTuple):
    """A row of the table of tensors."""

    offset: int
    sent: int
    held: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int


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


def take_spans_plainly(
    source: torch.Tensor,
    tensors: torch.Tensor,
    moves: torch.Tensor,
    storages: Sequence[torch.Tensor],
    multipliers: torch.Tensor,
    checks: bool,
    writes: bool,
) -> Found:
    """Compute the operator without a kernel."""
    spans, steps = _checked(source, tensors, moves, storages)
    fingerprints_T2 = torch.zeros(len(spans), 2, dtype=torch.int64, device=source.device)
    infinite_T2 = torch.zeros(len(spans), 2, dtype=torch.bool, device=source.device)
    by_tensor: list[list[SpanMove]] = [[] for _ in spans]
    for step in steps:
        by_tensor[step.tensor].append(step)
    dtypes = list(DTYPES.values())
    for index, span in enumerate(spans):
        sent_RC = _matrix(source, span)
        held_RC = sent_RC.to(dtypes[span.held])
        if checks:
            for column, values in enumerate((sent_RC, held_RC)):
                fingerprints_T2[index, column] = signed(fingerprint(values))
                infinite_T2[index, column] = _is_infinite(values)
        for step in by_tensor[index] if writes else ():
            _write(held_RC, step, storages[step.storage])
    return fingerprints_T2, infinite_T2


torch.library.define(
    "weight_sync::take_spans",
    "(Tensor source, Tensor tensors, Tensor moves, Tensor(a!)[] storages, Tensor multipliers, bool checks, bool writes)"
    " -> (Tensor, Tensor)",
)
torch.library.impl("weight_sync::take_spans", "CompositeExplicitAutograd", take_spans_plainly)


def _matrix(source: torch.Tensor, span: SpanTensor) -> torch.Tensor:
    """Return the values of a tensor [R, C] as they were sent, contiguous."""
    dtype = list(DTYPES.values())[span.sent]
    view = _elements(source, span.offset, dtype.itemsize, span[3:5], span[5:7])
    copied = view.clone(memory_format=torch.contiguous_format)  # which lies well for any dtype
    return copied.view(-1).view(dtype).view(span.rows, span.columns)


def _elements(
    content: torch.Tensor, offset: int, width: int, sizes: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Return the bytes of a matrix that lies in `content`, uint8 [R, C, width], a view."""
    return content.as_strided(
        (*sizes, width), (*(stride * width for stride in strides), 1), content.storage_offset() + offset
    )


def _is_infinite(values: torch.Tensor) -> bool:
    mask = EXPONENTS.get(values.dtype)
    if mask is None:
        return False
    return bool(((values.view(-1).view(SIGNED[values.itemsize]) & mask) == mask).any())


def _write(held_RC: torch.Tensor, step: SpanMove, storage: torch.Tensor) -> None:
    box = held_RC[step.first_row :, step.first_column :][: step.num_rows, : step.num_columns].contiguous()
    width = box.itemsize
    place = _elements(storage, step.offset, width, box.shape, (step.a, step.b))
    place.copy_(box.view(-1).view(torch.uint8).view(place.shape))


def _checked(
    source: torch.Tensor, tensors: torch.Tensor, moves: torch.Tensor, storages: Sequence[torch.Tensor]
) -> tuple[list[SpanTensor], list[SpanMove]]:
    """Return the rows of both tables.  Raises `RuntimeError`, as the kernel does, for one that does not fit."""
    for content in (source, *storages):
        _require(content.dim() == 1 and content.dtype == torch.uint8 and content.is_contiguous(), "bytes must be uint8")
    spans = [SpanTensor(*row) for row in _rows(tensors, TENSOR_COLUMNS, "tensor")]
    steps = [SpanMove(*row) for row in _rows(moves, MOVE_COLUMNS, "move")]
    for index, span in enumerate(spans):
        _check_tensor(span, f"tensor {index}", source.numel())
    for index, step in enumerate(steps):
        _check_move(step, f"move {index}", spans, storages)
    return spans, steps


def _rows(table: torch.Tensor, columns: int, name: str) -> Iterator[list[int]]:
    is_table = table.dim() == 2 and table.shape[1] == columns and table.dtype == torch.int64
    _require(is_table, f"the table of {name}s must be int64 [rows, {columns}]")
    for index, row in enumerate(table.tolist()):
        for number in row:
            _require(0 <= number < _LIMIT, f"{name} {index} has the number {number}")
        yield row


def _check_tensor(span: SpanTensor, name: str, source_bytes: int) -> None:
    dtypes = list(DTYPES.values())
    _require(max(span.sent, span.held) < len(dtypes), f"{name} has an unknown dtype")
    is_cast = span.sent == span.held or max(span.sent, span.held) < len(CAST_DTYPES)
    _require(is_cast, f"{name} would be cast from dtype {span.sent} to {span.held}")
    _require(span.rows * span.columns < _LIMIT, f"{name} is too large")
    end = _end(span.offset, dtypes[span.sent].itemsize, span[3:5], span[5:7])
    _require(end <= source_bytes, f"{name} lies outside of the source")


def _check_move(step: SpanMove, name: str, spans: Sequence[SpanTensor], storages: Sequence[torch.Tensor]) -> None:
    _require(step.tensor < len(spans), f"{name} has no tensor")
    _require(step.storage < len(storages), f"{name} has no storage")
    _require(step.kind == MoveKind.BOX, f"{name} has an unknown kind")
    span, storage = spans[step.tensor], storages[step.storage]
    is_inside = step.first_row + step.num_rows <= span.rows and step.first_column + step.num_columns <= span.columns
    _require(is_inside, f"{name} lies outside of its tensor")
    width = list(DTYPES.values())[span.held].itemsize
    _require((storage.data_ptr() + step.offset) % width == 0, f"{name} has a destination between two elements")
    end = _end(step.offset, width, (step.num_rows, step.num_columns), (step.a, step.b))
    _require(end <= storage.numel(), f"{name} lies outside of its storage")


def _end(offset: int, width: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in sizes:
        return 0
    return offset + (sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1) * width


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)

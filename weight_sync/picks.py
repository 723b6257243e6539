"""Picks: the indices of each dimension of a tensor that make up a `Piece` of it, and what of them lies in a box."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weight_sync.boxes import Box, flat_offset, size_of, whole_box
from weight_sync.moves import matrix_of, two_strides
from weight_sync.tensor_meta import Piece, TensorMeta

Picks = tuple[range, ...]


def picks_of(piece: Piece, shape: tuple[int, ...]) -> Picks:
    """Return the indices of each source dimension that make up the piece; one, where its own index is an integer."""
    picked = (*piece.index, *[slice(None)] * (len(shape) - len(piece.index)))
    return tuple(range(size)[slice(at, at + 1) if isinstance(at, int) else at] for at, size in zip(picked, shape))


def box_among(picks: Picks, held: Box) -> Box | None:
    """Return the picks that lie in a box of the source, as a box of their own numbers; None if none do."""
    box = []
    for picked, (first, end) in zip(picks, held, strict=True):
        start = max(0, -((picked.start - first) // picked.step))
        stop = min(len(picked), -((picked.start - end) // picked.step))
        if start >= stop:
            return None  # most boxes part in their first dimension, and there are many
        box.append((start, stop))
    return tuple(box)


def source_index(picks: Picks, box: Box, held: Box) -> tuple[slice, ...]:
    """Return a box of the picks' numbers as an index into a tensor that holds `held` of the source."""
    return tuple(
        slice(picked[start] - first, picked[stop - 1] - first + 1, picked.step)
        for picked, (start, stop), (first, _) in zip(picks, box, held, strict=True)
    )


def piece_in_box(shape: tuple[int, ...], piece: Piece, box: Box) -> tuple[Box, tuple[slice, ...]] | None:
    """Return what of a piece lies in a box of its tensor: a box of the piece, and an index into the box's content.

    The index leaves out no dimension and transposes nothing.  None if nothing lies there.
    """
    picks = picks_of(piece, shape)
    found = box_among(picks, box)
    if found is None:
        return None
    left_out = [dim for dim, at in enumerate(piece.index) if isinstance(at, int)]
    mine = tuple(edge for dim, edge in enumerate(found) if dim not in left_out)
    return (*mine[:-2], mine[-1], mine[-2]) if piece.transposed else mine, source_index(picks, found, box)


class BoxMatrix(NamedTuple):
    """A box of a logical tensor that is one of its matrix as well, and where it lies in a content.

    `start`: the first element there.  `numbers`: the columns of a `SpanTensor` from `rows` on.
    """

    box: Box
    start: int
    numbers: tuple[int, int, int, int, int, int, int, int]


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...], lead: int) -> tuple[BoxMatrix]:
    """Return all of a tensor that lies dense.  Thousands of tensors have few shapes."""
    rows, columns = matrix_of(shape, lead)
    return (BoxMatrix(whole_box(shape), 0, (rows, columns, columns, 1, 0, rows, 0, columns)),)


def parts_of_box(wire: TensorMeta, piece: Piece, shape: tuple[int, ...], lead: int) -> Sequence[BoxMatrix] | None:
    """Return what of a logical tensor of `shape` lies in the content that comes of a wire tensor; None if it is empty.

    The rows of its matrix are the first `lead` dimensions.  A box that is none of the matrix is cut.
    """
    if wire.box is None and piece.is_all:
        return _whole(shape, lead)
    if 0 in wire.shape:
        return None
    found = piece_in_box(wire.shape, piece, wire.box or whole_box(wire.shape))
    if found is None:
        return ()
    box, index = found
    strides = [math.prod(wire.sizes[dim + 1 :]) for dim in range(len(index))]
    start = sum(at.start * stride for at, stride in zip(index, strides))
    kept = [dim for dim in range(len(index)) if dim >= len(piece.index) or isinstance(piece.index[dim], slice)]
    if piece.transposed:
        kept[-2:] = kept[-1], kept[-2]
    return list(_cut(box, start, [strides[dim] * index[dim].step for dim in kept], shape, lead))


def _cut(box: Box, start: int, strides: Sequence[int], shape: Sequence[int], lead: int) -> Iterator[BoxMatrix]:
    """Cut a box along its first dimensions until it is one of the matrix."""
    sizes, edges = size_of(box), matrix_edges(box, shape, lead)
    both = None if edges is None else two_strides(sizes, strides, lead)
    if edges is not None and both is not None:
        top, bottom, left, right = edges
        yield BoxMatrix(box, start, (*matrix_of(shape, lead), *both, top, bottom - top, left, right - left))
        return
    cut = next(dim for dim, size in enumerate(sizes) if size > 1)  # one element is a box of any matrix
    for at in range(sizes[cut]):
        first = box[cut][0] + at
        unit = (*box[:cut], (first, first + 1), *box[cut + 1 :])
        yield from _cut(unit, start + at * strides[cut], strides, shape, lead)


def matrix_edges(box: Box, shape: Sequence[int], lead: int) -> tuple[int, int, int, int] | None:
    """Return first and last row, first and last column, each last one plus 1, of a box of the matrix.

    None where it is no box of that.
    """
    row, column = flat_offset(box[:lead], shape[:lead]), flat_offset(box[lead:], shape[lead:])
    if row is None or column is None:
        return None
    sizes = size_of(box)
    return row, row + math.prod(sizes[:lead]), column, column + math.prod(sizes[lead:])

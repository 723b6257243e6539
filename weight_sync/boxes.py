"""Boxes: parts of tensors, as the ranks of a sharded trainer hold them.

A box is a (start, stop) for each dimension of the whole tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from weight_sync.errors import WeightRequestError, unquoted

Box = tuple[tuple[int, int], ...]
_KNOWN_SHAPES = 1024


def parse_box(name: str, shape: Sequence[int], box: object) -> Box | None:
    """Parse the box of a tensor of `shape`; one that is all of the tensor is None.  Raises `WeightRequestError`."""
    if not (isinstance(box, list | tuple) and len(box) == len(shape) and all(map(_is_edge, box))):
        raise WeightRequestError(
            f"{unquoted(name)}: a box is a [start, stop] for each of the {len(shape)} dimensions, got {str(box)[:100]}"
        )
    parsed = tuple((start, stop) for start, stop in box)
    if parsed == whole_box(shape):
        return None
    if not all(0 <= start < stop <= size for (start, stop), size in zip(parsed, shape, strict=True)):
        raise WeightRequestError(f"{unquoted(name)}: {box_text(parsed)} is not a box inside of {list(shape)}")
    return parsed


def _is_edge(edge: object) -> bool:
    return isinstance(edge, list | tuple) and len(edge) == 2 and all(type(at) is int for at in edge)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor."""
    return _whole_box(tuple(shape))


@functools.lru_cache(_KNOWN_SHAPES)  # a model of 69,000 tensors has a dozen shapes
def _whole_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def size_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box's content."""
    return tuple(stop - start for start, stop in box)


def index_of(box: Box) -> tuple[slice, ...]:
    """Return the box as an index into the whole tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def flat_offset(box: Box, sizes: Sequence[int]) -> int | None:
    """Return the flat index of the box's first element in a row-major tensor of `sizes`; None if it is not one run."""
    lengths = size_of(box)
    partial = [dim for dim, (size, length) in enumerate(zip(sizes, lengths)) if size != length]
    if partial and any(length != 1 for length in lengths[: partial[-1]]):
        return None
    offset = 0
    for size, (start, _) in zip(sizes, box):
        offset = offset * size + start
    return offset


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return the first two boxes that have an element in common; None where there are none."""
    for one, other in itertools.combinations(boxes, 2):
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)):
            return one, other
    return None


def first_gap(shape: Sequence[int], boxes: Sequence[Box]) -> Box | None:
    """Return a box that none of `boxes` has an element of; None where they cover the whole tensor."""
    if 0 in shape:
        return None
    if not boxes:
        return whole_box(shape)
    if not shape:
        return None
    edges = sorted({0, shape[0], *(edge for box in boxes for edge in box[0])})
    for start, stop in itertools.pairwise(edges):
        rest = [box[1:] for box in boxes if box[0][0] <= start and stop <= box[0][1]]
        gap = first_gap(shape[1:], rest)
        if gap is not None:
            return ((start, stop), *gap)
    return None


def box_text(box: Box) -> str:
    """Return a box as one writes it: `[0:16, 8:32]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"

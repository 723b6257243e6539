"""Which trainer rank holds which box of a tensor, derived from its DTensor placements without communication.

A box is a (start, stop) for each dimension of the whole tensor.  `Shard` splits as `torch.chunk` does; where a mesh
dimension replicates, the rank at its coordinate 0 sends for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from weight_sync.errors import WeightRequestError
from weight_sync.sender.plan import Part

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Holding:
    """`box` of a tensor lives on trainer rank `rank` (its rank in the trainers' group)."""

    rank: int
    box: Box


def holdings(name: str, tensor: torch.Tensor, rank_of: Callable[[int], int]) -> list[Holding]:
    """Who contributes what of a tensor: boxes that do not overlap and together are the whole.

    `rank_of`: the rank in the trainers' group of a global rank; it raises `WeightRequestError` for one outside.  A
    plain tensor is the sending rank's.  Raises `WeightRequestError` for placements other than `Shard` and `Replicate`,
    and for a local tensor that does not fit its placement.
    """
    whole: Box = tuple((0, size) for size in tensor.shape)
    if not isinstance(tensor, DTensor):
        return [Holding(0, whole)]
    others = [placement for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
    if others:
        raise WeightRequestError(f"{name}: placement {others[0]!r} cannot be sent; redistribute to Shard or Replicate")
    mesh = tensor.device_mesh.mesh
    mine = tensor.device_mesh.get_coordinate()
    if mine is not None:
        _require_fit(name, tensor, _box_at(tensor, mine))
    held = []
    for coordinate in torch.cartesian_prod(*(torch.arange(size) for size in mesh.shape)).view(-1, mesh.ndim).tolist():
        sends = all(at == 0 for at, placement in zip(coordinate, tensor.placements) if type(placement) is Replicate)
        box = _box_at(tensor, coordinate)
        if sends and all(stop > start for start, stop in box):
            held.append(Holding(rank_of(int(mesh[tuple(coordinate)])), box))
    return held


def shard_box(shape: tuple[int, ...], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """The box left of a tensor after cuts (dimension, position, number of chunks), one after the other.

    A chunk is what `torch.chunk` makes it; a position beyond the last one is empty.
    """
    box = [(0, size) for size in shape]
    for dim, at, parts in cuts:
        start, stop = box[dim]
        chunk = -(-(stop - start) // parts)
        box[dim] = (min(start + at * chunk, stop), min(start + (at + 1) * chunk, stop))
    return tuple(box)


def box_of_part(part: Part, shape: tuple[int, ...]) -> Box:
    """The part's box in its source of `shape`; dimensions that the index picks with an integer have size 1."""
    box = []
    for dim, size in enumerate(shape):
        picked = part.index[dim] if dim < len(part.index) else slice(None)
        start, stop, _ = (picked, picked + 1, 1) if isinstance(picked, int) else picked.indices(size)
        box.append((start, stop))
    return tuple(box)


def intersection(one: Box, other: Box) -> Box | None:
    """None where they do not meet."""
    if one and (one[0][0] >= other[0][1] or other[0][0] >= one[0][1]):
        return None  # most pairs part here, and there are many pairs
    met = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return met if all(stop > start for start, stop in met) else None


def index_in(box: Box, outer: Box) -> tuple[slice, ...]:
    """`box` as an index into a tensor that holds `outer`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def size_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def flat_offset(box: Box, outer: Box) -> int | None:
    """Flat index of the box's first element in a row-major tensor that holds `outer`; None if it is not one run."""
    sizes, lengths = size_of(outer), size_of(box)
    partial = [dim for dim, (size, length) in enumerate(zip(sizes, lengths)) if size != length]
    if partial and any(length != 1 for length in lengths[: partial[-1]]):
        return None
    offset = 0
    for size, at in zip(sizes, index_in(box, outer)):
        offset = offset * size + at.start
    return offset


def _box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """What the rank at a coordinate of the tensor's mesh holds."""
    cuts = [
        (placement.dim, at, parts)
        for placement, at, parts in zip(tensor.placements, coordinate, tensor.device_mesh.mesh.shape)
        if isinstance(placement, Shard)
    ]
    return shard_box(tuple(tensor.shape), cuts)


def _require_fit(name: str, tensor: DTensor, box: Box) -> None:
    local = tuple(tensor.to_local().shape)
    if local != size_of(box):
        raise WeightRequestError(
            f"{name}: the local tensor is {list(local)}, where {tensor.placements} makes it {list(size_of(box))}"
        )

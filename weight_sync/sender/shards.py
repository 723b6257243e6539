"""The boxes of a tensor that each trainer rank holds, derived from its DTensor placements without communication.

A box is a (start, stop) for each dimension of the whole tensor.  `Shard` splits as `torch.chunk` does; where a mesh
dimension replicates, the rank at its coordinate 0 sends for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from weight_sync.errors import WeightRequestError
from weight_sync.tensor_meta import Piece

Box = tuple[tuple[int, int], ...]
Picks = tuple[range, ...]


@dataclass(frozen=True)
class Holding:
    """`box` of a tensor lives on trainer rank `rank` (its rank in the trainers' group)."""

    rank: int
    box: Box


def holdings(name: str, tensor: torch.Tensor, rank_of: Callable[[int], int]) -> list[Holding]:
    """Return which rank contributes what of a tensor: boxes that do not overlap and together are the whole.

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
    """Return the box left of a tensor after cuts (dimension, position, number of chunks), one after the other.

    A chunk is what `torch.chunk` makes it; a position beyond the last one is empty.
    """
    box = [(0, size) for size in shape]
    for dim, at, parts in cuts:
        start, stop = box[dim]
        chunk = -(-(stop - start) // parts)
        box[dim] = (min(start + at * chunk, stop), min(start + (at + 1) * chunk, stop))
    return tuple(box)


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


def size_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


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


def _box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """Return the box that the rank at a coordinate of the tensor's mesh holds."""
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
            f"{name}: the local tensor has shape {list(local)}, but {tensor.placements} needs {list(size_of(box))}"
        )

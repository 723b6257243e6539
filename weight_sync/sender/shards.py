"""The boxes of a tensor that each trainer rank holds, derived from its DTensor placements without communication.

A box is a (start, stop) for each dimension of the whole tensor.  `Shard` splits as `torch.chunk` does; where a mesh
dimension replicates, the rank at its coordinate 0 sends for all.

FSDP2 splits what tensor parallelism has split before, so the mesh dimension that comes first cuts last.  Its placement
is a `_StridedShard`, which states into how many parts the tensor was split by then:

    mesh [dp 2, tp 2], 8 rows      dp 0 tp 0   dp 0 tp 1   dp 1 tp 0   dp 1 tp 1
    _StridedShard(0, 2), Shard(0)    0, 1        4, 5        2, 3        6, 7         each tp's 4 rows, cut by dp
    Shard(0), Shard(0)               0, 1        2, 3        4, 5        6, 7         each dp's 4 rows, cut by tp

Cut in the right order, each rank has one box, also where sizes do not divide.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from weight_sync.boxes import Box, size_of
from weight_sync.errors import WeightRequestError
from weight_sync.sender.ranks import TrainerRanks


@dataclass(frozen=True)
class Holding:
    """`box` of a tensor lives on trainer rank `rank` (its rank in the trainers' group)."""

    rank: int
    box: Box


def holdings(name: str, tensor: torch.Tensor, ranks: TrainerRanks | None) -> list[Holding]:
    """Return which rank contributes what of a tensor: boxes that do not overlap and together are the whole.

    A plain tensor is the sending rank's; without `ranks` there are no others.  Raises `WeightRequestError` for
    placements other than `Shard`, `Replicate` and FSDP2's `_StridedShard`, for a rank outside of the group, and for a
    local tensor that does not fit its placement.
    """
    whole: Box = tuple((0, size) for size in tensor.shape)
    if not isinstance(tensor, DTensor):
        return [Holding(0, whole)]
    assert ranks is not None, "a sharded tensor has ranks"
    mesh, placements = tensor.device_mesh, tensor.placements
    order = _order_of_cuts(name, placements, mesh.shape)

    def box_at(coordinate: Sequence[int]) -> Box:
        return shard_box(tuple(tensor.shape), [(dim, coordinate[at], mesh.shape[at]) for dim, at in order])

    mine = mesh.get_coordinate()
    if mine is not None:
        _require_fit(name, tensor, box_at(mine))
    held = []
    for coordinate, rank in zip(itertools.product(*map(range, mesh.shape)), ranks.meshes.ranks(mesh), strict=True):
        sends = all(at == 0 for at, placement in zip(coordinate, placements) if type(placement) is Replicate)
        box = box_at(coordinate)
        if sends and all(stop > start for start, stop in box):
            held.append(Holding(ranks.rank_of(rank), box))
    return held


def _order_of_cuts(name: str, placements: Sequence[Placement], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return each dimension of the tensor that is split, with a mesh dimension that splits it, in the order of splits.

    `sizes`: the parts that each mesh dimension makes.  Raises `WeightRequestError` for a placement that is none of the
    three, or a `_StridedShard` of parts that no mesh dimensions behind it make.
    """
    orders: dict[int, list[int]] = {}
    for at in reversed(range(len(placements))):
        placement = placements[at]
        if type(placement) is Replicate:
            continue
        order = orders.setdefault(getattr(placement, "dim", -1), [])
        parts = list(itertools.accumulate((sizes[before] for before in order), operator.mul, initial=1))
        split = getattr(placement, "split_factor", 1)
        if type(placement) not in (Shard, _StridedShard) or split not in parts:
            raise WeightRequestError(
                f"{name}: placement {placement!r} cannot be sent; redistribute to Shard or Replicate"
            )
        order.insert(parts.index(split), at)
    return [(dim, at) for dim, order in orders.items() for at in order]


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


def _require_fit(name: str, tensor: DTensor, box: Box) -> None:
    local = tuple(tensor.to_local().shape)
    if local != size_of(box):
        raise WeightRequestError(
            f"{name}: the local tensor has shape {list(local)}, but {tensor.placements} needs {list(size_of(box))}"
        )

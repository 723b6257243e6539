"""A whole logical tensor from the parts that ranks hold.

    rank 0   rows 0..31      rank 1   rows 0..31      rank 2   rows 32..63      rank 3   nothing
             sends                    (the same)               sends

Knows regions and a group of ranks.  Does not know what a tensor is for, or where its parts live.
"""

from __future__ import annotations

import torch

from rollout.distributed.communicator import Communicator
from weight_sync.errors import WeightSyncError
from weight_sync.tensor_meta import Region, TensorMeta

_ALL = -1  # as a dimension: the whole tensor


def assemble_tensor(
    meta: TensorMeta, region: Region | None, content: torch.Tensor | None, ranks: Communicator
) -> torch.Tensor:
    """The tensor of `meta`, on the host.  All ranks call this together.

    `content`: what this rank holds, which is `region` of the tensor (None: all of it); None if it holds nothing.  Where
    several ranks hold the same region, the first one's counts.  Raises `WeightSyncError` on all ranks where a part of
    the tensor is nowhere.
    """
    mine = [0, 0, 0, 0]
    if content is not None:
        mine = [1, _ALL, 0, 0] if region is None else [1, region.dim, region.start, region.length]
    holders: dict[tuple[int, int, int], int] = {}
    for rank, (holds, dim, start, length) in enumerate(ranks.gather_ints(mine)):
        if holds:
            holders.setdefault((dim, start, length), rank)
    whole = torch.empty(meta.shape, dtype=meta.dtype)
    for part, root in _parts(meta, holders):
        target = whole if part is None else part.of(whole)
        received = torch.empty(target.shape, dtype=meta.dtype)
        if ranks.rank == root:
            assert content is not None
            received.copy_(content)
        ranks.broadcast(received.view(-1).view(torch.uint8), root)
        target.copy_(received)
    return whole


def _parts(meta: TensorMeta, holders: dict[tuple[int, int, int], int]) -> list[tuple[Region | None, int]]:
    """Regions that make up the tensor, in order, and who sends each."""
    if (_ALL, 0, 0) in holders:
        return [(None, holders[_ALL, 0, 0])]
    parts: list[tuple[Region | None, int]] = []
    ends: dict[int, int] = {}
    for (dim, start, length), root in sorted(holders.items()):
        if start != ends.setdefault(dim, 0):
            raise WeightSyncError(
                f"{meta.name}: parts of dimension {dim} do not join at {ends[dim]}: one is at {start}"
            )
        ends[dim] = start + length
        parts.append((Region(dim, start, length), root))
    if len(ends) != 1 or any(meta.shape[dim] != end for dim, end in ends.items()):
        raise WeightSyncError(f"{meta.name}: no rank holds all of it, and parts that they hold end at {ends or 0}")
    return parts

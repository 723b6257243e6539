"""`Shares`: what of each tensor that is sent each trainer rank brings, and where it lies in this rank's tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from weight_sync.boxes import Box, flat_offset, size_of, whole_box
from weight_sync.picks import Picks, box_among, picks_of, source_index
from weight_sync.sender.plan import Part, TensorPlan
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.sender.shards import Holding, holdings
from weight_sync.sender.source import sharding_of
from weight_sync.sender.views import Content
from weight_sync.tensor_meta import TensorMeta

T = TypeVar("T")


class Share(NamedTuple):
    """The `box` that one rank brings of a part with `sizes`: in the dimensions that are sent, and each of length 1
    that an index of the source leaves out.

    Without other ranks it is all of the part: the part's box in the whole tensor, of shape `sizes`.
    """

    part: Part
    rank: int
    box: Box
    sizes: tuple[int, ...]

    @property
    def meta(self) -> TensorMeta:
        """Describe the box as a tensor of its own."""
        of_part, sizes = self.part.meta, size_of(self.box)
        is_part = of_part.box is None and of_part.shape == sizes
        return of_part if is_part else TensorMeta(of_part.name, of_part.dtype, sizes)

    @property
    def offset(self) -> int | None:
        """The first element in the flat part; None if the box is not one run there."""
        return flat_offset(self.box, self.sizes)


class Shares:
    """`ranks`: None where this rank brings everything.  Raises `WeightRequestError` for shards that cannot be sent."""

    def __init__(self, plan: TensorPlan, ranks: TrainerRanks | None) -> None:
        self._plan = plan
        self._ranks, self._rank = ranks, 0 if ranks is None else ranks.rank
        self._numbers = {name: number for number, name in enumerate(plan.sources)}
        with torch.no_grad():
            self._here = [it.to_local() if isinstance(it, DTensor) else it for it in plan.sources.values()]
        self._held: dict[str, list[Holding]] = {}
        known: dict[object, list[Holding]] = {}  # most tensors have the form of another one
        for (name, it), here in zip(plan.sources.items() if ranks is not None else (), self._here):
            form = it.shape, sharding_of(it, here)
            if form not in known:
                known[form] = holdings(name, it, ranks)
            self._held[name] = known[form]
        self._parts = {part.meta: part for part in plan.parts.values()}
        self._shares: dict[TensorMeta, list[Share]] = {}

    def of(self, meta: TensorMeta) -> list[Share]:
        """Return what all ranks bring of a tensor or box that is sent; at most one share a rank."""
        if meta not in self._shares:
            part = self._parts[meta]
            self._shares[meta] = [Share(part, *met) for met in self._met(part)]
        return self._shares[meta]

    def own(self, meta: TensorMeta) -> list[Share]:
        """Return what this rank brings of it."""
        return [share for share in self.of(meta) if share.rank == self._rank]

    def content(self, share: Share) -> Content:
        """Return where this rank's share lies."""
        part = share.part
        number = self._numbers[part.source]
        here = self._here[number]
        index, start = _everything(here.dim()), 0 if here.is_contiguous() else None
        if not _is_whole(part):
            index = self._index(share)
            is_run = start == 0 and not part.piece.transposed and all(_is_dense(each) for each in index)
            start = flat_offset(tuple((each.start, each.stop) for each in index), here.shape) if is_run else None
        is_whole = start is not None and share.meta.shape == tuple(here.shape)
        return Content(number, share.meta, index, part.piece.transposed, start, is_whole, here.dtype, here.device)

    def _index(self, share: Share) -> tuple[slice, ...]:
        """Return the index of a share in this rank's tensor, in which it has all dimensions."""
        part = share.part
        picks = self._picks(part)
        if self._ranks is None:
            shape = self._plan.sources[part.source].shape
            return source_index(picks, whole_box(tuple(map(len, picks))), whole_box(shape))
        (held,) = [held.box for held in self._held[part.source] if held.rank == share.rank]
        return source_index(picks, _turned(part, share.box), held)

    def _met(self, part: Part) -> Iterator[tuple[int, Box, tuple[int, ...]]]:
        """Yield the rank, the box and the part's sizes of each share."""
        if self._ranks is None:
            if part.meta.numel:
                yield self._rank, part.meta.box or whole_box(part.meta.shape), part.meta.shape
            return
        if _is_whole(part):  # as most tensors are sent
            for held in self._held[part.source]:
                if 0 not in size_of(held.box):
                    yield held.rank, held.box, part.meta.shape
            return
        picks = self._picks(part)
        sizes = tuple(len(picked) for picked in picks)
        for held in self._held[part.source]:
            box = box_among(picks, held.box)
            if box is not None:
                yield held.rank, _turned(part, box), _turned(part, sizes)

    def _picks(self, part: Part) -> Picks:
        return picks_of(part.piece, tuple(self._plan.sources[part.source].shape))


@functools.lru_cache  # one for all tensors of a plan, not one each
def _everything(num_dims: int) -> tuple[slice, ...]:
    return (slice(None),) * num_dims


def _is_whole(part: Part) -> bool:
    """Return whether the part is all of its source."""
    return not part.piece.index and not part.piece.transposed


def _turned(part: Part, sizes: tuple[T, ...]) -> tuple[T, ...]:
    """Turn what is given for each dimension of the source into what it is for the part, and the other way round."""
    return (*sizes[:-2], sizes[-1], sizes[-2]) if part.piece.transposed else sizes


def _is_dense(at: slice) -> bool:
    return bool(at.step == 1 or at.stop - at.start == 1)

"""`Layout`: where everything that a refresh sends comes from and goes to, made once.  Holds no tensor.

WholeBucket     without other ranks: the pieces of a bucket, each packed from this rank's tensors
SharedBucket    what each rank packs of a bucket, and where the sending rank puts it
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.boxes import index_of
from weight_sync.bucket import PackPlan, cut_pieces, end_to_end
from weight_sync.fingerprint_batch import FingerprintPlan, Form
from weight_sync.fused_experts import is_fused
from weight_sync.receivers.distributed import PIECE_BYTES
from weight_sync.sender.lists import TensorLists
from weight_sync.sender.plan import TensorPlan
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.sender.shares import Share, Shares
from weight_sync.sender.slices import SlicePrints
from weight_sync.sender.views import Content, Packing, Recipe, Views
from weight_sync.tensor_meta import TensorMeta

_ALIGNMENT = 16  # at least any item size, so that a rank's bytes can be read as their dtypes
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Layout:
    """The layout of `buckets` of a plan's parts.  `ranks`: None where no tensor is sharded.  `device`: of buckets.

    `names`: of all tensors that are sent, as fingerprints are given; None: of the plan's parts.  Raises
    `WeightRequestError` for shards that cannot be sent.
    """

    def __init__(
        self,
        plan: TensorPlan,
        buckets: Sequence[Sequence[TensorMeta]],
        ranks: TrainerRanks | None,
        device: torch.device,
        names: Sequence[str] | None = None,
    ) -> None:
        self._names = list(plan.parts) if names is None else names
        shares = Shares(plan, ranks)
        self._own = [share for bucket in buckets for meta in bucket for share in shares.own(meta)]
        self._contents = [shares.content(share) for share in self._own]
        self.recipe = Recipe(self._contents)
        self.buckets: list[WholeBucket | SharedBucket] = []
        first = 0
        for bucket in buckets:
            last = first + sum(len(shares.own(meta)) for meta in bucket)
            packing = self._contents[first:last], first
            if ranks is None:
                self.buckets.append(WholeBucket(bucket, *packing, device))
            else:
                held = [shares.of(meta) for meta in bucket]
                self.buckets.append(SharedBucket(bucket, *packing, held, ranks, device))
            first = last

    @functools.cached_property
    def printed(self) -> npt.NDArray[np.bool_]:
        """The tensors that have a fingerprint, as bool: fused ones, which the engine splits, have none."""
        return np.array([not is_fused(name) for name in self._names], np.bool_)

    @functools.cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """The number among all tensors of each tensor of the buckets, in their order, empty ones as well."""
        numbers = {name: number for number, name in enumerate(self._names)}
        return np.array([numbers[name] for bucket in self.buckets for name in bucket.lists.names], np.int64)

    @functools.cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The number among all tensors of each that this rank holds something of, in the order of the views."""
        numbers = {name: number for number, name in enumerate(self._names)}
        return np.array([numbers[share.meta.name] for share in self._own], np.int64)

    @functools.cached_property
    def prints(self) -> FingerprintPlan:
        """The plan of the fingerprints of what this rank holds, in the order of the views.

        Raises `WeightRequestError` for a dtype without a fingerprint.
        """
        return FingerprintPlan(
            [
                Form(content.view_shape, content.dtype, content.meta.dtype, share.offset or 0, content.device)
                if self.printed[number] and share.offset is not None
                else Form((0,), content.dtype, torch.uint8, 0, content.device)
                for number, content, share in zip(self.numbers, self._contents, self._own, strict=True)
            ]
        )

    @functools.cached_property
    def slices(self) -> SlicePrints:
        """The plan of the fingerprints of what this rank holds that is not one run of its tensor, by number of view."""
        held = enumerate(zip(self.numbers, self._own, strict=True))
        return SlicePrints(
            [(at, share) for at, (tensor, share) in held if share.offset is None and self.printed[tensor]]
        )


class _Piece:
    """One broadcast of a bucket of whole tensors: numbers `first` .. of the views."""

    def __init__(self, metas: Sequence[TensorMeta], contents: Sequence[Content], first: int, device: torch.device):
        self._first, self._last = first, first + len(contents)
        self._packing = Packing(contents, first, device)
        self._dtype, self._device = metas[0].dtype, device
        kinds = {(content.meta.dtype, content.dtype, content.device, content.start is None) for content in contents}
        self._may_lie = kinds == {(self._dtype, self._dtype, device, False)}
        self._before = sum(content.meta.nbytes for content in contents[:-1])

    def content(self, views: Views, room: torch.Tensor) -> torch.Tensor:
        """Return the piece, uint8: where it lies, if it does so as it is sent; else packed into `room`."""
        first, last = self._first, self._last
        if self._may_lie and views[last - 1].data_ptr() - views[first].data_ptr() == self._before:
            there = end_to_end(views[first:last], self._dtype, self._device)
            if there is not None:
                return there
        self._packing.pack(views, room)
        return room


class WholeBucket:
    """A bucket of this rank's own tensors, which are numbers `first` .. of the views."""

    def __init__(
        self, metas: Sequence[TensorMeta], contents: Sequence[Content], first: int, device: torch.device
    ) -> None:
        self.lists = TensorLists.of(metas)
        cut = cut_pieces(metas, PIECE_BYTES)
        self.piece_sizes = [sum(meta.nbytes for meta in piece) for piece in cut]
        self.num_bytes = sum(self.piece_sizes)
        self._pieces = []
        at = 0
        for piece in cut:
            stop = at + sum(meta.numel > 0 for meta in piece)  # there is no content of an empty tensor
            self._pieces.append(_Piece(piece, contents[at:stop], first + at, device))
            at = stop

    def pieces(self, views: Views, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the pieces as they are broadcast, in `flat`, uint8 [num_bytes], or where they lie.

        Each is packed when it is asked for, so that it can be on its way while the next one is packed.
        """
        rooms = flat.split(self.piece_sizes)
        return (piece.content(views, room) for piece, room in zip(self._pieces, rooms, strict=True))


class _Join:
    """Blocks that go end to end to bytes `start` .. `stop - 1` of a bucket; `blocks`: their numbers over all ranks."""

    def __init__(self, blocks: list[int], sizes: list[int], start: int, word: torch.dtype, plan: PackPlan) -> None:
        self.blocks, self.start, self.stop = blocks, start, start + sum(sizes) * word.itemsize
        self.plan = plan


class SharedBucket:
    """A bucket of tensors that several ranks hold: `shares` of each, of which `contents` are this rank's.

    Each rank packs its shares into one block after the other.
    """

    def __init__(
        self,
        metas: Sequence[TensorMeta],
        contents: Sequence[Content],
        first: int,
        shares: Sequence[Sequence[Share]],
        ranks: TrainerRanks,
        device: torch.device,
    ) -> None:
        self.lists = TensorLists.of(metas)
        self.piece_sizes = [sum(meta.nbytes for meta in piece) for piece in cut_pieces(metas, PIECE_BYTES)]
        self.num_bytes = sum(self.piece_sizes)
        self.packing = Packing(contents, first, ranks.device)
        by_rank: list[list[Share]] = [[] for _ in range(ranks.world_size)]
        for held in shares:
            for share in held:
                by_rank[share.rank].append(share)
        totals = [sum(share.meta.nbytes for share in held) for held in by_rank]
        self.sizes = [-(-total // _ALIGNMENT) * _ALIGNMENT for total in totals]
        """The bytes of each rank."""
        self._word = _widest([share.meta.nbytes for held in by_rank for share in held])
        self._words = [[share.meta.nbytes // self._word.itemsize for share in held] for held in by_rank]
        in_order = [id(share) for held in by_rank for share in held]
        numbers = {share: number for number, share in enumerate(in_order)}
        self._joins: list[_Join] = []
        self._boxes: list[tuple[int, int, TensorMeta, Share]] = []  # block, first byte in the bucket, part
        self._place(metas, shares, numbers, (ranks.device, device))

    def _place(
        self,
        metas: Sequence[TensorMeta],
        shares: Sequence[Sequence[Share]],
        numbers: dict[int, int],
        devices: tuple[torch.device, torch.device],
    ) -> None:
        """Plan where each block goes: a share that is one run of its tensor next to the one before, others alone."""
        blocks: list[int] = []
        sizes: list[int] = []
        begin = start = 0

        def close() -> None:
            if blocks:
                plan = PackPlan([(size,) for size in sizes], self._word, self._word, devices)
                self._joins.append(_Join(blocks[:], sizes[:], begin, self._word, plan))
                blocks.clear()
                sizes.clear()

        for meta, held in zip(metas, shares, strict=True):
            if all(share.offset is not None for share in held):
                for share in sorted(held, key=lambda share: share.offset or 0):
                    blocks.append(numbers[id(share)])
                    sizes.append(share.meta.nbytes // self._word.itemsize)
            else:
                close()
                self._boxes += [(numbers[id(share)], start, meta, share) for share in held]
                begin = start + meta.nbytes
            start += meta.nbytes
        close()

    def assemble(self, packed: Sequence[torch.Tensor], flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Put the bytes of every rank, uint8 [sizes[rank]], into `flat`; return its pieces as they are broadcast."""
        blocks: list[torch.Tensor] = []
        for content, words in zip(packed, self._words, strict=True):
            if words:
                blocks += content[: sum(words) * self._word.itemsize].view(self._word).split(words)
        for join in self._joins:
            join.plan.pack([blocks[number] for number in join.blocks], flat[join.start : join.stop].view(self._word))
        for number, start, meta, share in self._boxes:
            whole = flat[start : start + meta.nbytes].view(meta.dtype).view(share.sizes)
            target = whole[index_of(share.box)]
            target.copy_(blocks[number].view(meta.dtype).view(target.shape))
        return iter(flat.split(self.piece_sizes))


def _widest(sizes: Sequence[int]) -> torch.dtype:
    """Return the widest integers that all of these numbers of bytes can be copied as."""
    common = math.gcd(*sizes)
    return next(word for word in _WORDS if common % word.itemsize == 0)

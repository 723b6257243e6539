"""`Shard`: a part of a tensor that a trainer rank has, by its box; and `ShardPlan`, by which its ranks send them.

Which rank sends which is checked before any does:

    stage 0, EP 0   experts.gate_up_proj [8, 2I, D]   box [0:4, 0:2I, 0:D]
    stage 0, EP 1   experts.gate_up_proj [8, 2I, D]   box [4:8, 0:2I, 0:D]
    both            norm.weight [D]                   all of it: one of the two sends it

Fused expert tensors are split into the experts' own, so that each has a fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from weight_sync.boxes import Box, box_text, first_gap, overlapping, parse_box, size_of, whole_box
from weight_sync.bucket import plan_buckets
from weight_sync.errors import WeightRequestError
from weight_sync.fused_experts import fused_pieces, is_fused, layout_of
from weight_sync.picks import piece_in_box
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.layout import Layout
from weight_sync.sender.lists import Contents, TensorLists
from weight_sync.sender.plan import Part, TensorPlan, is_cast
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.sender.source import Source
from weight_sync.tensor_meta import Piece, TensorMeta, dtype_name, parse_metas


class Shard(NamedTuple):
    """`tensor` is `box` of the tensor `name`, of shape `full_shape`: [start, stop] in each dimension; None: all of it.

    `name`: any that the engine's model accepts.  Of tied tensors only one is given.
    """

    name: str
    full_shape: Sequence[int]
    box: Sequence[Sequence[int]] | None
    tensor: torch.Tensor


def parts_of(shards: Sequence[Shard], dtype: torch.dtype | None) -> list[Part]:
    """Return what shards are sent as; sources are named by numbers.  `dtype`: of floating-point tensors; None: their
    own.

    Raises `WeightRequestError` for a box that does not fit its tensor, and for a shard that is given twice.
    """
    names = {shard.name for shard in shards}
    parts: dict[tuple[str, Box | None], Part] = {}
    for number, shard in enumerate(shards):
        for part in _parts(str(number), shard, names, dtype):
            key = part.meta.name, part.meta.box
            if key in parts:
                raise WeightRequestError(f"{shard.name} is given twice")
            parts[key] = part
    return list(parts.values())


def given_metas(shards: Sequence[Shard]) -> list[TensorMeta]:
    """Return the shards as they are given; `parts_of` has checked them."""
    return [
        TensorMeta(name, tensor.dtype, tuple(shape), None if box is None else parse_box(name, tuple(shape), box))
        for name, shape, box, tensor in shards
    ]


def _parts(source: str, shard: Shard, names: Collection[str], dtype: torch.dtype | None) -> Iterator[Part]:
    name, tensor, shape = shard.name, shard.tensor, tuple(shard.full_shape)
    box = (None if shard.box is None else parse_box(name, shape, shard.box)) or whole_box(shape)
    if tuple(tensor.shape) != size_of(box):
        raise WeightRequestError(
            f"{name}: the shard has shape {list(tensor.shape)}, but its box {box_text(box)} is {list(size_of(box))}"
        )
    sent_as = tensor.dtype if dtype is None or not is_cast(name, tensor) else dtype
    pieces = fused_pieces(name, shape, layout_of(name, names)) if is_fused(name) else [Piece(name)]
    for piece in pieces:
        whole = piece.shape_in(shape)
        if 0 in shape:  # there is nothing to take out of it
            yield Part(TensorMeta(piece.name, sent_as, whole), source, piece)
            continue
        found = piece_in_box(shape, piece, box)
        if found is not None:
            part = None if found[0] == whole_box(whole) else found[0]
            yield Part(TensorMeta(piece.name, sent_as, whole, part), source, piece._replace(index=found[1]))


def encoded(metas: Sequence[TensorMeta]) -> bytes:
    """Return metas as JSON."""
    lists = TensorLists.of(metas)
    return json.dumps([lists.names, lists.dtypes, lists.shapes, lists.boxes]).encode()


def decoded(content: bytes) -> list[TensorMeta]:
    """Return the metas of which `content` is the JSON."""
    return parse_metas(*json.loads(content))


class Assignment(NamedTuple):
    """`metas`: the whole tensors.  `sent`: for each rank, the numbers of the metas that it sends, among its own."""

    metas: list[TensorMeta]
    sent: list[list[int]]


def assigned(held: Sequence[Sequence[TensorMeta]]) -> Assignment:
    """Return which trainer rank sends what, from what each of them has: of equal boxes one, by turns of bytes.

    Raises as `require_whole`.
    """
    metas, holders = _holders(held)
    sent: list[list[int]] = [[] for _ in held]
    num_bytes = [0] * len(held)
    for boxes in holders.values():
        for places in boxes.values():
            rank, number = min(places, key=lambda place: (num_bytes[place[0]], place[0]))
            sent[rank].append(number)
            num_bytes[rank] += held[rank][number].nbytes
    return Assignment(list(metas.values()), [sorted(numbers) for numbers in sent])


def require_whole(held: Sequence[Sequence[TensorMeta]]) -> None:
    """Raise `WeightRequestError` for tensors whose boxes overlap or leave a gap, or that differ between ranks."""
    _holders(held)


_Holders = dict[Box, list[tuple[int, int]]]
"""The ranks that have each box, and its number among what they have."""


def _holders(held: Sequence[Sequence[TensorMeta]]) -> tuple[dict[str, TensorMeta], dict[str, _Holders]]:
    """Return the whole tensors, and who has what of each, by name.  Raises as `require_whole`."""
    metas: dict[str, TensorMeta] = {}
    holders: dict[str, _Holders] = {}
    for rank, mine in enumerate(held):
        for number, meta in enumerate(mine):
            first = metas.setdefault(meta.name, meta._replace(box=None))
            if (first.shape, first.dtype) != (meta.shape, meta.dtype):
                raise WeightRequestError(
                    f"{meta.name} is {_form(first)} on one trainer rank and {_form(meta)} on rank {rank}"
                )
            box = meta.box or whole_box(meta.shape)
            holders.setdefault(meta.name, {}).setdefault(box, []).append((rank, number))
    for name, boxes in holders.items():
        _require_whole(metas[name], boxes)
    return metas, holders


def _require_whole(meta: TensorMeta, holders: _Holders) -> None:
    """Raise `WeightRequestError` unless the boxes make up the tensor, each element once."""
    boxes = list(holders)
    both = overlapping(boxes)
    if both is not None:
        texts = [f"{box_text(box)} of trainer rank {holders[box][0][0]}" for box in both]
        raise WeightRequestError(f"{meta.name}: the boxes {' and '.join(texts)} overlap")
    gap = first_gap(meta.shape, boxes)
    if gap is not None:
        raise WeightRequestError(f"{meta.name}: no trainer rank has {box_text(gap)} of {list(meta.shape)}")


def _form(meta: TensorMeta) -> str:
    return f"{dtype_name(meta.dtype)} {list(meta.shape)}"


class ShardPlan:
    """Everything that a refresh of shards does alike each time, on one trainer rank.  Holds no tensor.

    `parts`: this rank's, which is `rank`, of `tensors`; `held`: what each rank has.  `contents`: the whole tensors.
    `layout`: of what this rank sends.  `num_rounds`: the most buckets that a rank sends.  Raises as `assigned`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        tensors: Sequence[torch.Tensor],
        held: Sequence[Sequence[TensorMeta]],
        rank: int,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        metas, sent = assigned(held)
        self.contents = Contents(metas)
        cut = [
            plan_buckets([mine[number] for number in numbers], bucket_bytes)
            for mine, numbers in zip(held, sent, strict=True)
        ]
        self.num_rounds = max(map(len, cut))
        sources = {str(number): tensor for number, tensor in enumerate(tensors)}
        plan = TensorPlan(sources, {f"{part.meta.name} {part.meta.box}": part for part in parts})
        self.layout = Layout(plan, cut[rank], None, device, self.contents.lists.names)

    def gatherer(self, source: Source, ranks: TrainerRanks | None) -> Gatherer:
        """Return who packs the shards of `source`, which are of the form that this plan was made for."""
        return Gatherer(self.layout, source.tensors, ranks)

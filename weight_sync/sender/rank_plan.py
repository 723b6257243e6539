"""`RankPlan`: the calls that send each rank of an engine what it keeps.  Holds no tensor.

    call 0     rank 0: its first tensors     rank 1: its first tensors
    call 1     rank 0: the next ones         rank 1: the next ones

Each rank's tensors are cut into buckets of their own, so that every call has some for each rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weight_sync.boxes import Box, whole_box
from weight_sync.bucket import plan_buckets
from weight_sync.json_lists import JsonList
from weight_sync.picks import picks_of, source_index
from weight_sync.rank_boxes import RankBoxes
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.layout import Layout, SharedBucket, WholeBucket
from weight_sync.sender.link import Bucket
from weight_sync.sender.lists import TensorLists
from weight_sync.sender.plan import Part, TensorPlan
from weight_sync.sender.rank_groups import RankPiece
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.tensor_meta import Piece, TensorMeta

_ALIGNMENT = 64


@dataclass(frozen=True)
class RankCall:
    """One call: the tensors of all ranks, in their order, and of each rank that gets some where its bytes come from."""

    lists: TensorLists
    tensors_per_rank: JsonList
    buckets: Sequence[tuple[int, WholeBucket | SharedBucket]]

    @property
    def room(self) -> int:
        """The bytes that its buckets take, each aligned."""
        return sum(_aligned(bucket.num_bytes) for _, bucket in self.buckets)

    def gather(self, gatherer: Gatherer, flat: torch.Tensor | None) -> Bucket:
        """Return the bucket to send.  `flat`: uint8 [room]; None on ranks that do not send.  Raises as `Gatherer`."""
        pieces: list[list[RankPiece]] = []
        start = 0
        for rank, bucket in self.buckets:
            room = None if flat is None else flat[start : start + bucket.num_bytes]
            pieces.append([RankPiece(rank, piece) for piece in gatherer.gather(bucket, room)])
            start += _aligned(bucket.num_bytes)
        in_turn = [piece for row in itertools.zip_longest(*pieces) for piece in row if piece is not None]
        num_bytes = sum(bucket.num_bytes for _, bucket in self.buckets)
        return Bucket(self.lists, in_turn, num_bytes, {"tensors_per_rank": self.tensors_per_rank})


class RankPlan:
    """The plan for one engine.  `boxes`: what its ranks are to be sent of `tensors`, in their order.

    `bucket_bytes`: of the buckets of all ranks in one call.  Raises as `Layout`, and `WeightRequestError` for a box
    that is none.
    """

    def __init__(
        self,
        tensors: TensorPlan,
        boxes: RankBoxes,
        bucket_bytes: int,
        device: torch.device,
        ranks: TrainerRanks | None,
    ) -> None:
        self.boxes = boxes
        parts: dict[str, Part] = {}
        by_rank: list[list[TensorMeta]] = [[] for _ in range(boxes.num_ranks)]
        for (name, part), pattern in zip(tensors.parts.items(), boxes.parsed_tensors(tensors.metas), strict=True):
            shape = tuple(tensors.sources[part.source].shape)
            for rank, wanted in enumerate(pattern):
                for box in wanted:
                    meta = TensorMeta(name, part.meta.dtype, part.meta.shape, box)
                    piece = part.piece if box is None else _boxed(part.piece, shape, box)
                    parts[f"{name} {box}"] = Part(meta, part.source, piece)
                    by_rank[rank].append(meta)
        share = max(1, bucket_bytes // max(1, boxes.num_ranks))
        calls = list(itertools.zip_longest(*(plan_buckets(metas, share) for metas in by_rank), fillvalue=[]))
        planned = [metas for call in calls for metas in call if metas]
        layout = Layout(TensorPlan(tensors.sources, parts), planned, ranks, device)
        self.layout = layout
        buckets = iter(layout.buckets)
        self.calls = [
            RankCall(
                TensorLists.of([meta for metas in call for meta in metas]),
                JsonList(map(len, call)),
                [(rank, next(buckets)) for rank, metas in enumerate(call) if metas],
            )
            for call in calls
        ]
        self.num_bytes = sum(bucket.num_bytes for bucket in layout.buckets)


def _boxed(piece: Piece, shape: tuple[int, ...], box: Box) -> Piece:
    """Return the box of a piece of a tensor of `shape` as a piece of that tensor."""
    picks, edges = picks_of(piece, shape), iter((*box[:-2], box[-1], box[-2]) if piece.transposed else box)
    given = (*piece.index, *[slice(None)] * (len(shape) - len(piece.index)))
    own = tuple((0, 1) if isinstance(at, int) else next(edges) for at in given)
    cuts = source_index(picks, own, whole_box(shape))
    index = tuple(at if isinstance(at, int) else cut for at, cut in zip(given, cuts, strict=True))
    return Piece(piece.name, index, piece.transposed)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

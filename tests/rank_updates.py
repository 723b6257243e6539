"""The ranks of an engine as threads, each with a `WeightUpdater`, and updates in which each is sent what it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from rollout.control.rank_consensus import RankConsensus, VerbMark
from rollout.distributed.parallel import Parallel
from tests.parallel_engine import RankEngine
from weight_sync.boxes import Box, index_of
from weight_sync.bucket import cut_pieces
from weight_sync.fingerprint import fingerprint
from weight_sync.rank_boxes import RankBoxes
from weight_sync.receivers.base import BucketSource
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import BucketLayout, PackedBucket, TensorMeta, tensor_bytes
from weight_sync.updater import WeightUpdater

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
Sent = list[tuple[TensorMeta, torch.Tensor]]
_BUCKET_BYTES = 1 << 14


class RankSource(BucketSource):
    """A call that brings this rank tensors of its own, in one message."""

    is_per_rank = True

    def __init__(self, sent: Sent) -> None:
        metas = [meta for meta, _ in sent]
        *offsets, end = [0, *itertools.accumulate(meta.nbytes for meta in metas)]
        self._content = torch.cat([torch.empty(0, dtype=torch.uint8), *(tensor_bytes(each) for _, each in sent)])
        self.layouts = [BucketLayout(metas, offsets, end)]

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        return self.layouts[0].metas

    def receive(self) -> Iterator[PackedBucket]:
        yield PackedBucket(self.layouts[0], self._content)


@dataclass
class RankUpdater:
    """One rank: its weights and its updater.  All ranks call the same methods."""

    parallel: Parallel
    engine: RankEngine
    staging: StagingMode = "host"

    def __post_init__(self) -> None:
        self._consensus = RankConsensus(self.parallel.weight_io, self.parallel.world)
        self._count = 0
        self.rank = self.parallel.position.world_rank
        self.updater = WeightUpdater(
            self.engine.model.weights,
            device="cpu",
            timeout_s=5.0,
            vote=self._consensus.vote,
            commit_vote=self._consensus.commit_vote,
            exchange=self._consensus.exchange,
            staging=self.staging,
            rank=self.rank,
            ranks=self.parallel.layout.world_size,
        )

    def verb(self, work: Callable[[], T]) -> T:
        """Run a verb's work on all ranks, as their queues do."""
        self._count += 1
        mark = VerbMark(self._count, f"verb {self._count}", "v0", 0)
        fail = self.updater.fail if self.updater.is_open else (lambda _: None)
        return self._consensus.run(mark, work, fail)

    def begin(self, tensors: Tensors, per_rank: bool = True) -> None:
        manifest = [(meta, fingerprint(tensors[meta.name])) for meta in metas_of(tensors)]
        self.verb(lambda: self.updater.begin("v1", manifest=manifest, per_rank=per_rank))

    def stated(self, tensors: Tensors) -> RankBoxes:
        return self.verb(lambda: self.updater.per_rank.boxes(metas_of(tensors)))

    def receive(self, sent: Sent, is_per_rank: bool = True) -> None:
        """Receive in calls of a few tensors; all ranks make as many."""
        runs = [
            [item for item in sent if item[0] in run] for run in cut_pieces([meta for meta, _ in sent], _BUCKET_BYTES)
        ]
        for number in range(max(int(count) for count in self.parallel.weight_io.gather_bytes(str(len(runs)).encode()))):
            source = RankSource(runs[number] if number < len(runs) else [])
            source.is_per_rank = is_per_rank
            self.verb(lambda source=source: self.updater.receive(source))  # type: ignore[misc]

    def end(self) -> None:
        self.verb(self.updater.verify)
        self.updater.commit()

    def holds(self, tensors: Tensors) -> bool:
        """Return whether every place has its part of `tensors`, bit for bit."""
        weights, right = self.engine.model.weights, True
        for name, tensor in tensors.items():
            for place in weights.places(name):
                part = tensor if place.region is None else place.region.of(tensor)
                right &= torch.equal(place.read(), part.to(place.read().dtype))
        return right


def metas_of(tensors: Tensors) -> list[TensorMeta]:
    return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def own(stated: RankBoxes, rank: int, tensors: Tensors) -> Sent:
    """Return what a sender sends to a rank, by what the engine stated."""
    metas = metas_of(tensors)
    sent = []
    for meta, pattern in zip(metas, stated.parsed_tensors(metas), strict=True):
        sent += [part_of(meta, box, tensors[meta.name]) for box in pattern[rank]]
    return sent


def part_of(meta: TensorMeta, box: Box | None, tensor: torch.Tensor) -> tuple[TensorMeta, torch.Tensor]:
    content = tensor if box is None else tensor[index_of(box)].contiguous()
    return TensorMeta(meta.name, meta.dtype, meta.shape, box), content

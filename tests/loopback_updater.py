"""A `WeightUpdater` to which a test hands the tensors that a transport would deliver."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weight_sync.known_calls import KnownCalls
from weight_sync.receivers.base import BucketSource, KnownCall, Receiver, StoredSource
from weight_sync.receivers.distributed import DistributedSource
from weight_sync.receivers.memory import MemorySource
from weight_sync.sealed_memory import MemoryAddress
from weight_sync.tensor_meta import BucketLayout, LogicalWeights, PackedBucket, TensorMeta
from weight_sync.update_groups import WeightUpdateGroups
from weight_sync.updater import WeightUpdater
from weight_sync.waiting import Patience

Named = list[tuple[str, torch.Tensor]]


_ALIGNMENT = 64
_KNOWN: KnownCalls[KnownCall] = KnownCalls(1000)


class LoopbackSource(BucketSource):
    """A `BucketSource` of given tensors; `failure` is raised when they should come.

    They come as one message, or each by itself (`packed=False`).  `metas`: of boxes, whose contents are given.
    """

    must_drain = True

    def __init__(
        self,
        named: Named,
        failure: Exception | None = None,
        *,
        packed: bool = True,
        metas: Sequence[TensorMeta] | None = None,
    ) -> None:
        self.named = named
        self._metas = metas or [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        self.failure = failure
        self.drained = False
        self._is_packed = packed

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        metas = self._metas
        if self._is_packed:
            self.layouts = _KNOWN.get(tuple(metas), lambda: _call_of(metas)).layouts
        return metas

    def receive(self) -> Iterator[Named | PackedBucket]:
        if self.failure is not None:
            raise self.failure
        yield packed(self.layouts[0], self.named) if self.layouts else self.named
        self.drained = True


def _call_of(metas: Sequence[TensorMeta]) -> KnownCall:
    return KnownCall(metas, [layout_of(metas)])


def layout_of(metas: Sequence[TensorMeta]) -> BucketLayout:
    """Return a layout of tensors in one message."""
    ends = itertools.accumulate(-(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT for meta in metas)
    *offsets, end = [0, *ends]
    return BucketLayout(metas, offsets, end)


def packed(layout: BucketLayout, named: Named) -> PackedBucket:
    """Return a message of these tensors, in memory of the device on which they lie."""
    device = named[0][1].device if named else "cpu"
    content = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    for (_, view), (_, tensor) in zip(layout.views(content), named, strict=True):
        view.copy_(tensor)
    return PackedBucket(layout, content)


def broadcast_source(
    updater: WeightUpdater,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    load_format: str | None = None,
    boxes: Sequence[object] | None = None,
    memory: Mapping[str, int] | None = None,
) -> DistributedSource:
    """Return the source of one bucket, which rank 0 of a joined group will broadcast, or has in memory."""
    if memory is not None:
        address = MemoryAddress(*(memory[name] for name in MemoryAddress._fields))
        lists, filled = (lambda: (names, dtypes, shapes, boxes)), memory.get("filled", 0)
        return MemorySource(address, lists, group_name, updater.receiver, filled=filled)
    return DistributedSource(lambda: (names, dtypes, shapes, boxes), group_name, updater.receiver, load_format)


class LoopbackUpdater(WeightUpdater):
    """`send` delivers one bucket; `failure` is raised there.

    Leases are looked after as the engine's scheduler does, between the calls.
    """

    failure: Exception | None = None

    def begin(self, *arguments: Any, **named: Any) -> None:
        self.expire()
        super().begin(*arguments, **named)

    def send(self, named: Named, weight_version: str | None = None, update_id: str | None = None) -> None:
        is_foreign = self.foreign(update_id, weight_version) is not None
        try:
            self.receive(LoopbackSource(named, self.failure), weight_version, update_id)
        finally:
            if not is_foreign:
                self.renew_lease()


def new_receiver(max_tensors: int = 1000) -> Receiver:
    """Return a receiver on the CPU of which no update is open.  It knows calls with that many tensors."""
    groups, patience = WeightUpdateGroups(torch.device("cpu"), 1.0, Patience()), Patience()
    return Receiver(torch.device("cpu"), 1.0, groups, patience, None, False, KnownCalls(max_tensors))


def content_of(source: StoredSource, max_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a call.  It must have announced the same ones."""
    metas = source.announce(max_bytes)
    tensors = {name: tensor.clone() for bucket in source.receive() for name, tensor in bucket.named()}
    assert list(metas) == [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return tensors


def new_updater(weights: LogicalWeights) -> LoopbackUpdater:
    """Return an updater of one rank, on the CPU."""
    return LoopbackUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine)


def refresh(weights: LogicalWeights, buckets: Iterable[Named], weight_version: str = "v2") -> None:
    """Play a whole transaction."""
    updater = new_updater(weights)
    updater.begin(weight_version)
    for bucket in buckets:
        updater.send(bucket)
    updater.verify()
    updater.commit()

"""`BucketSource`: what a transport offers to the updater.

A transport is one file next to this one.  It turns one control call into wire tensors.  The transaction checks names,
shapes, coverage and versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.bucket_layout import BucketLayout, KnownCalls, PackedBucket
from weight_sync.errors import TransportError, UnknownGroupError, WeightRequestError
from weight_sync.held_memory import Areas
from weight_sync.loading import ProvenPart
from weight_sync.process_group import WeightUpdateGroups
from weight_sync.stored_tensors import StoredTensor, check_total, read_in_parts
from weight_sync.tensor_meta import TensorMeta
from weight_sync.waiting import Patience

Named = Sequence[tuple[str, torch.Tensor]]
Bucket = Named | PackedBucket | ProvenPart


@dataclass(frozen=True)
class Receiver:
    """The rank that receives, as a transport needs it.

    `timeout_s`: deadline of one bucket.  `memory`: kept from call to call; None: the call's own.  `whole`: nothing is
    delivered before everything has arrived.
    """

    device: torch.device
    timeout_s: float
    groups: WeightUpdateGroups
    patience: Patience
    memory: Areas | None
    whole: bool
    known_calls: KnownCalls[KnownCall]


@dataclass(frozen=True)
class KnownCall:
    """A call's tensors, the layouts of its buckets, and its messages in the transport's own form.

    They are the same in each refresh by the same sender.
    """

    metas: Sequence[TensorMeta]
    layouts: Sequence[BucketLayout]
    messages: Sequence[Any] = ()

    @property
    def num_tensors(self) -> int:
        return len(self.metas)


class BucketSource:
    """The tensors of one control call.  Used once: `announce`, then `receive`.

    `must_drain`: a refused call is still received, and discarded: its sender sends before it can learn of the refusal.
    `casts`: floating-point tensors are cast to the model's dtypes, whether anybody asks for it or not.
    """

    must_drain = False
    casts = False
    layouts: Sequence[BucketLayout] = ()
    """Once it was announced: of the buckets that will come, where all are `PackedBucket`s."""

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return the wire tensors that will come, by any names; empty where only receiving them shows.

        Reads and checks all that is possible without taking memory for the content.  Raises `WeightRequestError` and
        its kinds, also for more than `max_bytes` of content.
        """
        raise NotImplementedError

    def receive(self) -> Iterable[Bucket]:
        """Return the content as (name, tensor), in one or more buckets, or as this rank's parts of tensors.

        A bucket's tensors are the caller's only until the next one is asked for.  Raises `WeightRequestError` and its
        kinds, `TransportError`.  Every wait has a deadline.
        """
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Notify the sender, where that is possible, and release what is held.

        Called at most once, after any failure of the call, also of `announce` and `receive`.  Raises nothing; every
        wait has a deadline.
        """


class StoredSource(BucketSource):
    """A call whose tensors are known, and lie in storages, before any of them is read.

    `_release`: gives up what is held; it may be called again.
    """

    _tensors: Sequence[StoredTensor] = ()
    _release: Callable[[], object]

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return every tensor of the call.  Raises `WeightRequestError`; what is held is released then."""
        try:
            tensors = self._parse()
            check_total(tensors, max_bytes)
            self._check_storages()
        except WeightRequestError:
            self._release()
            raise
        self._tensors = tensors
        return [tensor.meta for tensor in tensors]

    def receive(self) -> Iterator[Named]:
        """Yield a few tensors a bucket.

        Raises `ContentError` (shared memory ends early), `WeightRequestError` (it is gone), `TransportError` (CUDA
        memory cannot be opened).
        """
        try:
            yield from read_in_parts(self._tensors)
        finally:
            self._tensors = ()
            self._release()

    def refuse(self, reason: str) -> None:
        """Release what is held.  The sender learns of the failure by the call's answer."""
        self._tensors = ()
        self._release()

    def _parse(self) -> Sequence[StoredTensor]:
        """Return the call's tensors.  Raises `WeightRequestError`."""
        raise NotImplementedError

    def _check_storages(self) -> None:
        """Check that the storages of the tensors can be read.  Raises `WeightRequestError`."""


class RefusedSource(BucketSource):
    """A call whose arguments are refused: nothing of it is received.

    As its broadcast may be on its way, the group is left, or all (None).
    """

    def __init__(self, reason: str, group_name: str | None, receiver: Receiver) -> None:
        self._reason, self._group_name = reason, group_name
        self._groups = receiver.groups

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        raise WeightRequestError(self._reason)

    def refuse(self, reason: str) -> None:
        if self._group_name is None:
            self._groups.close()
            return
        with suppress(UnknownGroupError):
            self._groups.destroy(self._group_name)


def deliver(
    source: BucketSource,
    take: Callable[[Bucket], None],
    refusal: Exception | None = None,
    pace: Callable[[float], None] | None = None,
) -> None:
    """Hand every bucket to `take`, unless there is a `refusal`, which is raised.

    A source that must be drained is received to its end even so, and after `take` raised; then that is raised, also
    where draining fails: it is what the sender can do something about.  `pace(seconds)` is called after every bucket
    that took so long to take.
    """
    if refusal is not None and not source.must_drain:
        raise refusal
    try:
        for bucket in source.receive():
            start = time.perf_counter()
            try:
                if refusal is None:
                    take(bucket)
                    if pace is not None:
                        pace(time.perf_counter() - start)
            except Exception as error:
                if not source.must_drain:
                    raise
                refusal = error
    except TransportError as error:
        if refusal is None:
            raise
        raise refusal from error
    if refusal is not None:
        raise refusal

"""`BucketSource`: what a transport offers to the updater.

A transport is one file next to this one.  It turns one control call into wire tensors.  The transaction checks names,
shapes, coverage and versions.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.errors import TransportError, UnknownGroupError, WeightRequestError
from weight_sync.held_memory import Areas
from weight_sync.intake import ProvenPart
from weight_sync.known_calls import KnownCalls
from weight_sync.stored_tensors import Storage, StoredPart, StoredTensor, check_total, parts_of, storages_of
from weight_sync.tensor_meta import BucketLayout, PackedBucket, TensorMeta
from weight_sync.update_groups import WeightUpdateGroups
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

    They are the same in each refresh by the same sender.  The names of the files of a folder's index count as messages.
    """

    metas: Sequence[TensorMeta]
    layouts: Sequence[BucketLayout]
    messages: Sequence[Any] = ()

    @property
    def num_tensors(self) -> int:
        return max(len(self.metas), len(self.messages))


class BucketSource:
    """The tensors of one control call.  Used once: `announce`, then `receive`.

    `must_drain`: a refused call is still received, and discarded: its sender sends before it can learn of the refusal.
    `casts`: floating-point tensors are cast to the model's dtypes, whether anybody asks for it or not.
    `is_per_rank`: the call brings each rank tensors of its own.
    """

    must_drain = False
    casts = False
    is_per_rank = False
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

    A call that describes its tensors as one before did is not read again.  Its storages are others, and are checked
    each time.  `_release`: gives up what is held; it may be called again.
    """

    _release: Callable[[], object]

    def __init__(self, receiver: Receiver) -> None:
        self._known_calls = receiver.known_calls
        self._memory = Areas() if receiver.memory is None else receiver.memory
        self._parts: Sequence[StoredPart] = ()
        self._storages: Sequence[Storage] = ()

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Return every tensor of the call.  Raises `WeightRequestError`; what is held is released then."""
        try:
            call, storages = self._read()
            check_total(call.messages, max_bytes)
            self._check_storages()
        except WeightRequestError:
            self._release()
            raise
        self._parts, self._storages, self.layouts = call.messages, storages, call.layouts
        return call.metas

    def receive(self) -> Iterator[PackedBucket]:
        """Yield a few tensors a bucket.

        Raises `ContentError` (shared memory ends early), `WeightRequestError` (it is gone), `TransportError` (CUDA
        memory cannot be opened).
        """
        try:
            for part in self._parts:
                yield part.read(self._storages, self._memory)
        finally:
            self._forget()

    def refuse(self, reason: str) -> None:
        """Release what is held.  The sender learns of the failure by the call's answer."""
        self._forget()

    def _forget(self) -> None:
        self._parts, self._storages = (), ()
        self._release()

    def _read(self) -> tuple[KnownCall, Sequence[Storage]]:
        """Return the call, and its storages by number.  Raises `WeightRequestError`."""
        raise NotImplementedError

    def _check_storages(self) -> None:
        """Check that the storages of the tensors can be read.  Raises `WeightRequestError`."""


def stored_call(tensors: Sequence[StoredTensor], known_calls: KnownCalls[KnownCall]) -> KnownCall:
    """Return the call that brings these tensors, whose messages are `StoredPart`s: one that was known, if there is."""
    storages = storages_of(tensors)
    numbers = {id(storage): number for number, storage in enumerate(storages)}
    described: list[tuple[object, ...]] = [tuple(type(storage).__name__ for storage in storages)]
    for tensor in tensors:
        place = tensor.place
        where = (numbers[id(place.storage)], place.start, place.shape, place.stride)
        described.append((tensor.meta.name, str(place.dtype), *where))

    def make() -> KnownCall:
        parts = parts_of(tensors)
        return KnownCall([tensor.meta for tensor in tensors], [part.layout for part in parts], parts)

    return known_calls.get(("stored", hashlib.sha256(json.dumps(described).encode()).digest()), make)


class UnreadSource(BucketSource):
    """A call whose arguments are refused, and of which nothing is on its way."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        raise WeightRequestError(self._reason)


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
        refusal.__cause__ = error
    if refusal is not None:
        try:
            raise refusal
        finally:
            del refusal  # whose traceback holds this frame, and with it all that was staged

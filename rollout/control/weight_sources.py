"""The manifest that a message states, and the verbs that bring tensors with the transport of each: one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import astuple

from rollout.core.messages.tensor_lists import digest_of
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    RefusedBucketReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsReqInput,
)
from weight_sync.manifest import Manifest, parse_manifest
from weight_sync.receivers.base import BucketSource, RefusedSource, UnreadSource
from weight_sync.receivers.delta import DELTA, DeltaSource
from weight_sync.receivers.distributed import PIECES, DistributedSource, RankShare
from weight_sync.receivers.ipc import IpcSource
from weight_sync.receivers.memory import MemorySource
from weight_sync.receivers.tensor import SafetensorsSource, TensorSource
from weight_sync.sealed_memory import MemoryAddress
from weight_sync.shared_segment import SharedSegment
from weight_sync.updater import WeightUpdater

SourceFactory = Callable[[Any, WeightUpdater], BucketSource]


def _distributed(verb: UpdateWeightsFromDistributedReqInput, updater: WeightUpdater) -> BucketSource:
    receiver, group = updater.receiver, verb.group_name
    update = updater.update
    if verb.load_format == DELTA and update is not None and not (update.target is updater.model and update.takes_first):
        return RefusedSource("a delta changes the model alone: an adapter or a draft is sent whole", group, receiver)
    if verb.load_format == DELTA and verb.tensors_per_rank is not None:
        return RefusedSource("a delta is for all ranks: leave out tensors_per_rank", group, receiver)
    if verb.load_format == DELTA:
        if verb.lists().boxes is not None:
            return RefusedSource("a delta takes no boxes, as its frame has the tensors that change", group, receiver)
        inner, model = DistributedSource(verb.lists, group, receiver), updater.model
        homes = model.planner.homes(updater.target)
        return DeltaSource(
            inner, model.weights, updater.target, updater.exchange, model.quantised, homes, model.known_calls
        )
    packed_bytes, counts = verb.packed_buffer_size_bytes, verb.tensors_per_rank
    if verb.memory is not None:
        if verb.load_format != PIECES or counts is not None:
            return RefusedSource(f"memory has the form {PIECES!r}, for all ranks alike", group, receiver)
        *address, filled = astuple(verb.memory)
        return MemorySource(MemoryAddress(*address), verb.lists, group, receiver, verb.digest(), filled)
    if counts is None:
        return DistributedSource(verb.lists, group, receiver, verb.load_format, packed_bytes, verb.digest())
    share = RankShare(updater.rank, updater.ranks, tuple(counts))
    key = verb.digest(), share
    return DistributedSource(verb.lists, group, receiver, verb.load_format, packed_bytes, key, share)


def _refused(verb: RefusedBucketReqInput, updater: WeightUpdater) -> BucketSource:
    return RefusedSource(verb.reason, verb.group_name, updater.receiver)


def _ipc(verb: UpdateWeightsFromIPCReqInput, updater: WeightUpdater) -> BucketSource:
    return IpcSource(verb.zmq_handles, updater.receiver)


def _tensor(verb: UpdateWeightsFromTensorReqInput, updater: WeightUpdater) -> BucketSource:
    if verb.shm_name is not None:
        if verb.shm_unlink and updater.ranks > 1:
            return UnreadSource("shm_unlink is for an engine of one rank: unlink it when the answer has come")
        segment = SharedSegment(verb.shm_name, verb.shm_bytes or 0)
        return SafetensorsSource(segment, updater.receiver, unlink=verb.shm_unlink)
    payload = verb.payload if verb.payloads is None else verb.payloads[updater.rank]
    if payload is None:
        payload = bytearray()
    if verb.format == "safetensors":
        return SafetensorsSource(payload, updater.receiver)
    rank, ranks, is_shared = updater.rank, updater.ranks, verb.serialized_once
    return TensorSource(payload, verb.load_format, updater.receiver, rank=rank, ranks=ranks, is_shared=is_shared)


SOURCES: dict[type[UpdateWeightsReqInput[Any]], SourceFactory] = {
    UpdateWeightsFromDistributedReqInput: _distributed,
    RefusedBucketReqInput: _refused,
    UpdateWeightsFromTensorReqInput: _tensor,
    UpdateWeightsFromIPCReqInput: _ipc,
}
"""A factory runs on the I/O thread and only constructs the source, which does the reading and checking.

It raises nothing: an error is the source's to raise, so that it fails the update that the call is of.
"""


def manifest_of(verb: BeginWeightUpdateReqInput) -> Manifest | None:
    """Return the tensors that a begin states, with their fingerprints; None where it states none.

    Raises `WeightRequestError`.
    """
    if not verb.has_manifest:
        return None
    key = verb.digest()
    if key is None:
        entries = parse_manifest(map(astuple, verb.entries()))
        tensors = [(meta.name, str(meta.dtype), meta.shape) for meta, _ in entries]
        return Manifest.of(entries, digest_of(repr(tensors).encode()))
    return Manifest.of_lists(lambda: verb.lists() or ([], [], [], None), verb.fingerprints(), key)

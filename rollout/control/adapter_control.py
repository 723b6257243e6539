"""The verbs over adapters: read and convert on the I/O thread, then change the table of every rank in one turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from rollout.adapters.config import LoraConfig
from rollout.adapters.peft_folder import Adapter, SentTensors, mark_of, read_adapter
from rollout.control.registered_adapters import RegisteredAdapters
from rollout.control.weight_queue import Job, nothing, replies
from rollout.core.args.named_folders import NamedFolders
from rollout.core.errors import AdapterError, NotFound
from rollout.core.messages.adapters import (
    AdapterReply,
    LoadLoraAdapterFromDistributedReqInput,
    LoadLoraAdapterFromTensorsReqInput,
    LoadLoraAdapterReqInput,
    UnloadLoraAdapterReqInput,
    UnloadReply,
)
from rollout.model.adapters import AdapterTable, PreparedAdapter, unknown_adapter
from weight_sync.receivers.base import Bucket, BucketSource, deliver
from weight_sync.receivers.distributed import DistributedSource
from weight_sync.receivers.tensor import TensorSource
from weight_sync.tensor_meta import PackedBucket
from weight_sync.updater import WeightUpdater
from weight_sync.waiting import Patience

_Sent = LoadLoraAdapterFromTensorsReqInput | LoadLoraAdapterFromDistributedReqInput


class AdapterControl:
    """Plans loads and unloads, which take their turns in the queue of the weight verbs.

    A rank that cannot read or convert the adapter has failed for all, before any table is changed.
    """

    def __init__(
        self, table: AdapterTable, folders: NamedFolders, updater: WeightUpdater, registered: RegisteredAdapters
    ) -> None:
        self._table, self._folders, self._updater, self._registered = table, folders, updater, registered

    @property
    def jobs(self) -> dict[type, Callable[[Any], Job]]:
        return {
            LoadLoraAdapterReqInput: self._load_folder,
            LoadLoraAdapterFromTensorsReqInput: self._load_tensors,
            LoadLoraAdapterFromDistributedReqInput: self._load_broadcast,
            UnloadLoraAdapterReqInput: self._unload,
        }

    def _load_folder(self, verb: LoadLoraAdapterReqInput) -> Job:
        folder = self._folders.readable(verb.lora_path)

        def read() -> Adapter:
            marks = self._updater.exchange(mark_of(folder))
            if len(set(marks)) > 1:  # before any rank reads what others do not have
                raise AdapterError(f"the ranks read other contents of {folder}: copy one to all machines")
            return read_adapter(folder)

        self._require(verb)
        return self._load(verb, read)

    def _load_tensors(self, verb: LoadLoraAdapterFromTensorsReqInput) -> Job:
        updater = self._updater
        payload = verb.payload if verb.payloads is None else verb.payloads[updater.rank]

        def source() -> TensorSource:
            return TensorSource(
                payload or bytearray(),
                verb.load_format,
                updater.receiver,
                rank=updater.rank,
                ranks=updater.ranks,
                is_shared=verb.serialized_once,
                may_be_dict=True,
            )

        return self._load_sent(verb, source, verb.expected_checksums)

    def _load_broadcast(self, verb: LoadLoraAdapterFromDistributedReqInput) -> Job:
        def source() -> DistributedSource:
            return DistributedSource(verb.lists, verb.group_name, self._updater.receiver, key=verb.lists_digest)

        return self._load_sent(verb, source)

    def _load_sent(
        self, verb: _Sent, source: Callable[[], BucketSource], checksums: Mapping[str, str] | None = None
    ) -> Job:
        """Plan a load of tensors that a call brings.  A call that is refused is received as far as its sender needs."""
        updater = self._updater
        try:
            self._require(verb)
            config = LoraConfig.of(verb.config_dict)
        except AdapterError as refusal:
            turn_away = functools.partial(updater.turn_away, refusal=refusal)
            no_reply = replies("", UnloadReply(loaded_adapters={}))
            return Job(verb, lambda: turn_away(source()), no_reply, waits=updater.patience)
        read = functools.partial(self._received, source, config, checksums)
        return self._load(verb, read, updater.patience)

    def _received(
        self, make_source: Callable[[], BucketSource], config: LoraConfig, checksums: Mapping[str, str] | None
    ) -> Adapter:
        source, sent = make_source(), SentTensors(checksums)

        def take(bucket: Bucket) -> None:
            assert isinstance(bucket, PackedBucket), "sources of calls make no others"
            sent.add(bucket.named())

        try:
            source.announce(self._table.max_bytes)
            deliver(source, take)
        except Exception as error:
            source.refuse(str(error))  # gives shared memory back, or leaves a group in which a broadcast may come
            raise
        return sent.adapter(config)

    def _require(self, verb: LoadLoraAdapterReqInput | _Sent) -> None:
        """Raise `AdapterError` for a load that is refused whatever it brings."""
        self._table.require_name(verb.lora_name)
        if not verb.load_inplace and self._table.serves(verb.lora_name):
            raise AdapterError(f"the adapter {verb.lora_name!r} is served; load_inplace makes this its next version")

    def _load(
        self, verb: LoadLoraAdapterReqInput | _Sent, read: Callable[[], Adapter], waits: Patience | None = None
    ) -> Job:
        def io() -> PreparedAdapter:
            return self._table.prepare(verb.lora_name, read(), pinned=verb.pinned)

        def step(prepared: PreparedAdapter) -> tuple[str, AdapterReply]:
            label = self._table.put(prepared).label
            reply = AdapterReply(
                lora_name=label.name,
                version=label.version,
                content_digest=label.content_digest,
                loaded_adapters=self._table.sources,
            )
            ignored = [f"{pattern} matches none of its modules." for pattern in prepared.content.unmatched]
            return " ".join([f"Adapter {label.name!r} loaded as version {label.version}.", *ignored]), reply

        return Job(verb, io, step, waits=waits)

    def _unload(self, verb: UnloadLoraAdapterReqInput) -> Job:
        self._registered.require_not_coming(verb.lora_name)

        def step(_: Any) -> tuple[str, UnloadReply]:
            known = list(self._table.sources)
            was_served = self._table.unload(verb.lora_name, retire=verb.retire)
            was_registered = self._registered.drop(verb.lora_name)
            if not (was_served or was_registered or verb.missing_ok):
                raise NotFound(unknown_adapter(verb.lora_name, known))
            return f"Adapter {verb.lora_name!r} unloaded.", UnloadReply(loaded_adapters=self._table.sources)

        return Job(verb, nothing, step)

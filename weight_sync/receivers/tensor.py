"""Receives tensors that came inside the call: one safetensors file, or payloads as SGLang's clients make them.

The file, a form without pickle, is the bytes of the call, or lies in shared memory that the call names.  A bucket is a
view of the bytes, or read once from shared memory.  The payloads:

    load_format None                list of (name, tensor); a tensor may be a `LocalSerializedTensor`, one pickle a rank
    load_format "flattened_bucket"  {"flattened_tensor": bytes end to end, "metadata": where each tensor lies in them}

Where the content is: in the payload itself; in shared memory that torch made with the sharing strategy "file_system";
in CUDA memory by IPC handle, where this process sees that device.  The strategy "file_descriptor", torch's default on
Linux, hands descriptors over a connection that only processes of one family can open: refused, with what to do.

`payload_reader` reads the pickles, `torch_payload` resolves their names.  Of a flattened bucket like one before only
the flattened tensor is read, and what follows is compared by a digest.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from weight_sync.cuda_ipc import CudaStorage, require_cuda
from weight_sync.errors import WeightRequestError
from weight_sync.payload_reader import Front, Record
from weight_sync.receivers.base import KnownCall, Receiver, StoredSource, stored_call
from weight_sync.safetensors_file import header_text, parse_text
from weight_sync.shared_segment import SharedSegment, release_torch_shared_file
from weight_sync.stored_tensors import (
    InlineStorage,
    SegmentStorage,
    Storage,
    StoredTensor,
    TensorPlace,
    contiguous_place,
    name_tensor,
    require_apart,
    storages_of,
)
from weight_sync.tensor_meta import MAX_NAME_LENGTH
from weight_sync.torch_payload import FLATTENED_BUCKET, FLATTENED_METADATA, LOCAL_TENSOR, TorchPayload

MAX_HEADER_BYTES = 16 << 20
UNLINK_PREFIX = "lockstep_"
"""The beginning of names that a call may have removed.  Other shared memory of this machine is left alone."""
FLATTENED = "flattened_bucket"
_KEYS = ("flattened_tensor", "metadata")


class SafetensorsSource(StoredSource):
    """One call's tensors: `content` is the file, or the segment that holds it.

    A segment is read and left alone; with `unlink` its name, which must begin with `UNLINK_PREFIX`, is removed once it
    is read, or refused after it was found to be a safetensors file.
    """

    def __init__(self, content: bytearray | SharedSegment, receiver: Receiver, *, unlink: bool = False) -> None:
        super().__init__(receiver)
        self._content = content
        self._unlink = unlink
        self._release: Callable[[], object] = _nothing

    def refuse(self, reason: str) -> None:
        """Remove the segment's name after the call failed, if that was asked for."""
        if self._unlink and self._release is _nothing:
            with suppress(WeightRequestError):
                self._read()
        super().refuse(reason)

    def _read(self) -> tuple[KnownCall, Sequence[Storage]]:
        storage = self._storage()
        text = header_text(
            "safetensors", storage.nbytes, lambda start, n: storage.read(start, start + n), MAX_HEADER_BYTES
        )

        def read() -> KnownCall:
            tensors = []
            for found in parse_text("safetensors", storage.nbytes, text).tensors:
                place = contiguous_place(storage, found.meta.dtype, found.meta.shape, found.start)
                tensors.append(name_tensor(found.meta.name, place))
            return stored_call(tensors, self._known_calls)

        key = ("safetensors", type(storage), storage.nbytes, hashlib.sha256(text).digest())
        call = self._known_calls.get(key, read)
        if self._unlink and isinstance(self._content, SharedSegment):
            self._release = weakref.finalize(self, self._content.unlink)
        return call, [storage]

    def _storage(self) -> Storage:
        if not isinstance(self._content, SharedSegment):
            return InlineStorage(memoryview(self._content))
        name = self._content.name
        if self._unlink and not name.removeprefix("/").startswith(UNLINK_PREFIX):
            raise WeightRequestError(f"shm_unlink needs a name that begins with {UNLINK_PREFIX!r}, got {name[:200]!r}")
        self._content.check()
        return SegmentStorage(self._content)


def _nothing() -> None:
    """Release nothing: nothing is held."""


# --- payloads ---------------------------------------------------------------------------------------------------------


class TensorSource(StoredSource):
    """One call's payload for one rank: `payload` are the pickled bytes, base64 taken off.  `is_shared`: several ranks
    read the same one.  `may_be_dict`: tensors by name are taken for the list, as the tensors of adapters come.

    Shared memory is released when the content is read or refused, at the latest with the source itself.
    """

    def __init__(
        self,
        payload: bytearray,
        load_format: str | None,
        receiver: Receiver,
        *,
        rank: int = 0,
        ranks: int = 1,
        is_shared: bool = False,
        may_be_dict: bool = False,
    ) -> None:
        super().__init__(receiver)
        self._may_be_dict = may_be_dict
        self._payload = payload
        self._load_format = load_format
        self._rank = rank
        self._ranks = ranks
        self._is_shared = is_shared
        self._reader = TorchPayload()
        self._release = weakref.finalize(self, _release_all, self._reader.segments, self._reader.cuda_storages)

    def _read(self) -> tuple[KnownCall, Sequence[Storage]]:
        if self._load_format not in (None, FLATTENED):
            raise WeightRequestError(_refused_format(self._load_format))
        front = self._reader.read_front(memoryview(self._payload), *_KEYS)
        if front is not None:
            return self._read_flattened(front)
        tensors = self._parse()
        return stored_call(tensors, self._known_calls), storages_of(tensors)

    def _read_flattened(self, front: Front) -> tuple[KnownCall, Sequence[Storage]]:
        def read() -> KnownCall:
            return stored_call(split_flattened(self._reader.read_rest(*_KEYS, front)), self._known_calls)

        return self._known_calls.get(_key_of(front), read), [front.value.storage]

    def _parse(self) -> list[StoredTensor]:
        value = self._reader.read(memoryview(self._payload))
        if isinstance(value, Record) and value.type is FLATTENED_BUCKET:
            value = value.values
        if self._load_format == FLATTENED or (isinstance(value, dict) and "flattened_tensor" in value):
            return split_flattened(value)
        value = list(value.items()) if self._may_be_dict and isinstance(value, dict) else value
        return [self._named(item) for item in _as_list(value, "a list of (name, tensor)")]

    def _named(self, item: Any) -> StoredTensor:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise WeightRequestError("malformed payload: each entry must be a pair of name and tensor")
        name, value = item
        if isinstance(value, Record) and value.type is LOCAL_TENSOR:
            values = _as_list((value.values or {}).get("values"), "the values of a LocalSerializedTensor")
            if len(values) != self._ranks or not isinstance(values[self._rank], memoryview):
                raise WeightRequestError(
                    f"a LocalSerializedTensor holds {len(values)} values, but this engine has {self._ranks} ranks"
                )
            value = self._reader.read(values[self._rank])
        if not isinstance(value, TensorPlace):
            shown = name[:MAX_NAME_LENGTH] if isinstance(name, str) else type(name).__name__
            raise WeightRequestError(f"malformed payload: the value of {shown!r} is not a tensor")
        return name_tensor(name, value)

    def _check_storages(self) -> None:
        if self._reader.cuda_storages:
            require_cuda()
        if self._is_shared and (self._reader.segments or self._reader.cuda_storages):
            raise WeightRequestError(
                "several ranks read this payload, but only one can open torch's shared memory and CUDA handles. "
                "Serialize the tensors once for each rank, or send a shm_name."
            )
        for segment in {segment.name: segment for segment in self._reader.segments}.values():
            segment.check()


def _key_of(front: Front) -> Hashable:
    """Return a key of all that the tensors of a flattened bucket depend on, but for their content."""
    place: TensorPlace = front.value
    where = (type(place.storage), place.dtype, place.shape, place.stride, place.start)
    return FLATTENED, where, front.memo, hashlib.sha256(front.rest).digest()


def split_flattened(value: Any) -> list[StoredTensor]:
    """Return the tensors of a flattened bucket.  Raises `WeightRequestError`.

    `start_idx` and `end_idx` count elements of the flattened tensor, which are bytes where it is uint8.  Tensors may
    leave gaps and come in any order; they may not overlap.
    """
    fields = value if isinstance(value, dict) else {}
    flattened, metadata = fields.get("flattened_tensor"), fields.get("metadata")
    if not isinstance(flattened, TensorPlace) or not flattened.is_flat:
        raise WeightRequestError("malformed payload: a flattened bucket is a dict with a flat 'flattened_tensor'")
    entries = _as_list(metadata, "the metadata of a flattened bucket")
    tensors = [_cut(flattened, _metadata_fields(entry)) for entry in entries]
    require_apart(tensors, "the flattened bucket")
    return tensors


def _cut(flattened: TensorPlace, fields: Mapping[str, Any]) -> StoredTensor:
    """Return one tensor of the bucket."""
    start, end, numel = (fields.get(key) for key in ("start_idx", "end_idx", "numel"))
    shape, dtype = fields.get("shape"), fields.get("dtype")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= flattened.numel:
        raise WeightRequestError(f"a tensor lies outside of a flattened bucket of {flattened.numel} elements")
    if not isinstance(shape, (tuple, list)) or not isinstance(dtype, torch.dtype):
        raise WeightRequestError("malformed payload: a tensor of a flattened bucket has no shape or dtype")
    unit = flattened.dtype.itemsize
    if flattened.dtype not in (torch.uint8, dtype):
        raise WeightRequestError(f"a flattened bucket of {flattened.dtype} cannot hold tensors of {dtype}")
    first = flattened.span[0] + start * unit
    tensor = name_tensor(fields.get("name"), contiguous_place(flattened.storage, dtype, shape, first))
    if tensor.meta.nbytes != (end - start) * unit or numel not in (None, tensor.meta.numel, tensor.meta.nbytes):
        raise WeightRequestError(
            f"{tensor.meta.name}: shape {list(tensor.meta.shape)} has {tensor.meta.nbytes} bytes, "
            f"but its place in the flattened bucket has {(end - start) * unit}"
        )
    return tensor


def _metadata_fields(entry: Any) -> Mapping[str, Any]:
    values = entry.values if isinstance(entry, Record) and entry.type is FLATTENED_METADATA else entry
    if not isinstance(values, dict):
        raise WeightRequestError("malformed payload: an entry of the metadata is not a FlattenedTensorMetadata")
    return values


def _as_list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise WeightRequestError(f"malformed payload: {what} was expected")
    return value


def _refused_format(load_format: str | None) -> str:
    if load_format == "direct":
        return "load_format 'direct' names an engine's internal parameters; send tensors by their checkpoint names"
    return f"unknown load_format {str(load_format)[:64]!r}; known: null, {FLATTENED!r}"


def _release_all(segments: list[SharedSegment], cuda_storages: list[CudaStorage]) -> None:
    while segments:
        release_torch_shared_file(segments.pop())
    while cuda_storages:
        cuda_storages.pop().release()

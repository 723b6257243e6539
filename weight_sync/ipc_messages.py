"""Messages of checkpoint-engine's parameter server to a worker, read without unpickling them.

    parameter server (REQ, binds)            worker (REP, connects)
    handle of a uint8 buffer          -->    b""
    [{name, dtype, shape, offset}]    -->    b"" once the content is copied out of the buffer; any number of buckets
    None                              -->    b"" once the buffer is released
    None                              -->    b""
    an exception, instead of any of these: it gives up and expects no answer

A worker that cannot go on answers with text instead, and the server then sends the exception.

Messages are pickles, or the same as JSON, which the first byte shows: {"shm_name", "nbytes"} for the
handle, dtypes by name, null, {"error": text}.

Protocol of the PyPI package checkpoint-engine, 0.4.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.cuda_ipc import CudaStorage, require_cuda
from weight_sync.errors import WeightRequestError
from weight_sync.payload_reader import Function
from weight_sync.shared_segment import SharedSegment
from weight_sync.stored_tensors import (
    SegmentStorage,
    Storage,
    StoredTensor,
    TensorPlace,
    contiguous_place,
    name_tensor,
    require_apart,
)
from weight_sync.tensor_meta import parse_dtype
from weight_sync.torch_payload import TorchPayload

MAX_MESSAGE_BYTES = 64 << 20  # as many as a request body may have

_PICKLE = 0x80
_CUDA_ARGUMENTS = 15
_CUDA_DEVICE = 6  # of them: the sender's number of the device, not ours
_MAX_TEXT = 1000
_EXCEPTIONS = (
    "Exception",
    "RuntimeError",
    "ValueError",
    "TypeError",
    "AssertionError",
    "AttributeError",
    "KeyError",
    "IndexError",
    "NotImplementedError",
    "MemoryError",
    "OSError",
    "FileNotFoundError",
    "ConnectionError",
    "TimeoutError",
)


@dataclass(frozen=True)
class SenderFailure:
    """The exception with which the server gives up."""

    text: str


@dataclass(frozen=True)
class IpcBuffer:
    """`nbytes` bytes from byte `start` of a storage, rewritten by the sender for every bucket.

    `segments`: torch shared files that the reader of the handle must release.
    """

    storage: Storage
    start: int
    nbytes: int
    segments: Sequence[SharedSegment] = ()


class _Payload(TorchPayload):
    """A payload with torch's names and exceptions: an exception is read as a `SenderFailure`."""

    def _functions(self) -> dict[tuple[str, str], Callable[..., Any]]:
        failures: dict[tuple[str, str], Callable[..., Any]] = {
            ("builtins", name): functools.partial(_failure, name) for name in _EXCEPTIONS
        }
        return super()._functions() | failures


def read_handle(data: memoryview, device: torch.device) -> IpcBuffer | SenderFailure:
    """Read the first message.  `device`: where the worker computes; a CUDA handle is opened there.

    Raises `WeightRequestError`, also for a buffer that is too short, gone, or on a device that cannot be reached.
    """
    value, segments = _decode(data)
    if isinstance(value, SenderFailure):
        return value
    if isinstance(value, dict) and set(value) == {"shm_name", "nbytes"}:
        return _native_buffer(value["shm_name"], value["nbytes"])
    place = _rebuild(value, device)
    if not isinstance(place, TensorPlace) or place.dtype != torch.uint8 or not place.is_flat:
        raise WeightRequestError("the first message is not the handle of a flat uint8 buffer")
    if isinstance(place.storage, SegmentStorage):
        place.storage.segment.check()
    elif isinstance(place.storage, CudaStorage):
        require_cuda()
    else:
        raise WeightRequestError(
            "the buffer came inside the message, so later buckets could not reach the engine. Share it: "
            "torch.multiprocessing.set_sharing_strategy('file_system') and ForkingPickler, or {shm_name, nbytes}"
        )
    return IpcBuffer(place.storage, place.span[0], place.numel, segments)


def read_bucket(data: memoryview, buffer: IpcBuffer) -> list[StoredTensor] | SenderFailure | None:
    """Read a later message: tensors of the buffer, or None for the end.

    Raises `WeightRequestError`: not a bucket, an entry without one of its four fields, a dtype that is not known, bytes
    outside the buffer, an offset that the dtype cannot be read from, two tensors that overlap.
    """
    value, _ = _decode(data)
    if value is None or isinstance(value, SenderFailure):
        return value
    if not isinstance(value, list):
        raise WeightRequestError("a message is not a bucket, the end or an exception")
    tensors = [_place(entry, buffer) for entry in value]
    require_apart(tensors, "the buffer")
    return tensors


def read_end(data: memoryview) -> SenderFailure | bool:
    """Return True if the message is the end, a `SenderFailure` if it is an exception, and False for anything else."""
    try:
        value, _ = _decode(data)
    except WeightRequestError:
        return False
    return value if isinstance(value, SenderFailure) else value is None


def _decode(data: memoryview) -> tuple[Any, list[SharedSegment]]:
    """Return the message's value, and the torch shared files that it counts on."""
    if len(data) and data[0] == _PICKLE:
        payload = _Payload()
        return payload.read(data), payload.segments
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise WeightRequestError(f"a message is not a pickle or JSON: {str(error)[:200]}") from None
    if isinstance(value, dict) and set(value) == {"error"}:
        return SenderFailure(str(value["error"])[:_MAX_TEXT]), []
    return value, []


def _rebuild(value: Any, device: torch.device) -> Any:
    """Rebuild a handle: what `torch.multiprocessing` reduces a tensor to, not yet called: (function, arguments)."""
    if not isinstance(value, tuple):
        return value
    if len(value) != 2 or not isinstance(value[0], Function) or not isinstance(value[1], tuple):
        raise WeightRequestError("the first message is not a handle: expected (function, arguments)")
    function, arguments = value
    if len(arguments) == _CUDA_ARGUMENTS and device.type == "cuda":
        ours = torch.cuda.current_device() if device.index is None else device.index
        arguments = (*arguments[:_CUDA_DEVICE], ours, *arguments[_CUDA_DEVICE + 1 :])
    try:
        return function.call(*arguments)
    except (TypeError, ValueError) as error:
        raise WeightRequestError(f"malformed handle: {str(error)[:200]}") from None


def _native_buffer(name: Any, nbytes: Any) -> IpcBuffer:
    if not isinstance(name, str) or type(nbytes) is not int or not 0 <= nbytes < 2**48:
        raise WeightRequestError("a handle must be {'shm_name': text, 'nbytes': integer}")
    segment = SharedSegment(name, nbytes)
    segment.check()
    return IpcBuffer(SegmentStorage(segment), 0, nbytes)


def _place(entry: Any, buffer: IpcBuffer) -> StoredTensor:
    """Return one tensor of a bucket."""
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    absent = [key for key in ("name", "dtype", "shape", "offset") if key not in fields]
    if absent:
        raise WeightRequestError(f"a tensor of a bucket lacks {', '.join(absent)}")
    name, dtype, shape, offset = (fields[key] for key in ("name", "dtype", "shape", "offset"))
    if isinstance(dtype, str):
        dtype = parse_dtype(dtype)
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, (tuple, list)):
        raise WeightRequestError(f"{str(name)[:200]}: a tensor of a bucket has no dtype or no shape")
    if type(offset) is not int or not 0 <= offset <= buffer.nbytes:
        raise WeightRequestError(
            f"{str(name)[:200]}: offset {str(offset)[:40]} is outside a buffer of {buffer.nbytes} bytes"
        )
    if offset % dtype.itemsize:
        raise WeightRequestError(f"{str(name)[:200]}: {dtype} cannot be read from offset {offset}")
    tensor = name_tensor(name, contiguous_place(buffer.storage, dtype, shape, buffer.start + offset))
    if offset + tensor.meta.nbytes > buffer.nbytes:
        raise WeightRequestError(
            f"{tensor.meta.name}: bytes {offset} to {offset + tensor.meta.nbytes} are outside a buffer "
            f"of {buffer.nbytes}"
        )
    return tensor


def _failure(kind: str, *arguments: Any) -> SenderFailure:
    text = next((argument for argument in arguments if isinstance(argument, str)), "")
    return SenderFailure(f"{kind}: {text}"[:_MAX_TEXT])

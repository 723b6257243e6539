"""The names that a payload of tensors may use, and what each of them means here.

The table covers what torch writes for CPU and CUDA tensors (its own reductions, `ForkingPickler`'s for shared memory,
plain bytes) and the metadata classes of SGLang's clients, under every module path that they have had, NeMo-RL's copies
included.  Each name stands for a function or a record of ours that describes: no tensor is made, no file or connection
opened while reading.

Pickled bytes of a storage are torch's legacy file format inside the pickle; they are read by the same reader, without
`torch.load`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weight_sync.cuda_ipc import CudaHandle, CudaStorage, max_handle_bytes
from weight_sync.errors import WeightRequestError
from weight_sync.payload_reader import Budget, Front, Function, PayloadReader, RecordType
from weight_sync.shared_segment import SharedSegment, torch_shared_file
from weight_sync.stored_tensors import InlineStorage, SegmentStorage, Storage, TensorPlace, place_tensor
from weight_sync.tensor_meta import DTYPES

MAX_INSTRUCTIONS = 2_000_000

FLATTENED_METADATA = RecordType(
    "FlattenedTensorMetadata", frozenset({"name", "shape", "dtype", "start_idx", "end_idx", "numel"})
)
FLATTENED_BUCKET = RecordType("FlattenedTensorBucket", frozenset({"flattened_tensor", "metadata"}))
LOCAL_TENSOR = RecordType("LocalSerializedTensor", frozenset({"values"}))

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_COUNT = struct.Struct("<q")
_MAX_NAME_BYTES = 4096
"""A file's or an event's."""

_REDUCTIONS = "torch.multiprocessing.reductions"
_SGLANG = "sglang.srt."
_NEMO_RL = "nemo_rl.models.generation.sglang.utils.train_utils"  # its own copies of SGLang's classes
_BUCKET_MODULES = (_SGLANG + "weight_sync.tensor_bucket", _SGLANG + "model_executor.model_runner", _NEMO_RL)
_LOCAL_MODULES = ("model_executor.model_runner_components.weight_updater", "model_executor.model_runner")
_PATCH_MODULES = (_SGLANG + "utils.patch_torch", _SGLANG + "patch_torch", _NEMO_RL)
_LEGACY_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class StorageClass:
    """A storage class that a payload names; `dtype` where the class fixes it."""

    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class TypedStorage:
    """A storage with the default dtype of its tensors."""

    storage: Storage
    dtype: torch.dtype


class TensorClass:
    """`torch.Tensor` or `Parameter`, where a payload names it: no difference here."""


class TorchPayload:
    """Reads the pickles of one call.

    `segments`: the torch shared files that they name, as often as they were counted.  `cuda_storages`: the CUDA memory,
    each once, however many handles name it; its owner waits until all are released.
    """

    def __init__(self, max_instructions: int = MAX_INSTRUCTIONS) -> None:
        self.segments: list[SharedSegment] = []
        self.cuda_storages: list[CudaStorage] = []
        self._cuda_memory: dict[Hashable, CudaStorage] = {}
        self._budget = Budget(max_instructions)
        self._admitted = _NO_TENSORS | {name: Function(call) for name, call in self._functions().items()}

    def read(self, data: memoryview) -> Any:
        """Return the value of a pickle that fills `data`; tensors are `TensorPlace`s.  Raises `WeightRequestError`."""
        reader = PayloadReader(data, self._admitted, self._budget)
        return _whole(reader.read(), reader, data)

    def read_front(self, data: memoryview, first: str, second: str) -> Front | None:
        """Read a dict with a tensor under its first key as far as its second; None for any other pickle.

        The rest may fetch plain values alone, and None in place of others.  Raises `WeightRequestError`.
        """
        front = PayloadReader(data, self._admitted, self._budget).read_front(first, TensorPlace, second)
        if front is None:  # what it names will be read again
            self.segments.clear()
            self.cuda_storages.clear()
            self._cuda_memory.clear()
            return None
        return front._replace(memo=tuple((at, value if _is_plain(value) else None) for at, value in front.memo))

    def read_rest(self, first: str, second: str, front: Front) -> Any:
        """Return the dict whose front was read; there are no other tensors in it.  Raises `WeightRequestError`."""
        reader = PayloadReader(memoryview(front.rest), _NO_TENSORS, self._budget)
        value = reader.read_rest(first, second, front)
        return _whole(value, reader, front.rest)

    def _functions(self) -> dict[tuple[str, str], Callable[..., Any]]:
        functions: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): _no_hooks,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
            ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
            ("torch.storage", "_load_from_bytes"): self._load_storage,
            (_REDUCTIONS, "rebuild_tensor"): _rebuild_shared_tensor,
            (_REDUCTIONS, "rebuild_typed_storage"): _typed_storage,
            (_REDUCTIONS, "rebuild_typed_storage_child"): _typed_storage_child,
            (_REDUCTIONS, "rebuild_storage_filename"): self._shared_by_filename,
            (_REDUCTIONS, "rebuild_storage_fd"): _shared_by_descriptor,
            (_REDUCTIONS, "rebuild_storage_empty"): _empty_storage,
            (_REDUCTIONS, "rebuild_cuda_tensor"): self._cuda_tensor,
        }
        for module in _PATCH_MODULES:
            functions[module, "_rebuild_cuda_tensor_modified"] = self._cuda_tensor
        return functions

    def _shared_by_filename(
        self, kind: Any, manager: Any, handle: Any, size: Any, dtype: Any = None
    ) -> Storage | TypedStorage:
        _require(isinstance(kind, StorageClass) and isinstance(manager, memoryview), "a shared storage")
        itemsize = 1 if dtype is None else _dtype(dtype).itemsize
        name = bytes(_short(handle)).decode("ascii")
        segment = torch_shared_file(name, _number(size) * itemsize)
        self.segments.append(segment)
        storage = SegmentStorage(segment)
        return storage if dtype is None else TypedStorage(storage, dtype)

    def _cuda_tensor(self, *arguments: Any) -> TensorPlace:
        place = _rebuild_cuda_tensor(*arguments)
        if not isinstance(place.storage, CudaStorage):
            return place
        handle = place.storage.handle
        known = self._cuda_memory.get(handle.place)
        if known is None:
            self._cuda_memory[handle.place] = place.storage
            self.cuda_storages.append(place.storage)
            return place
        known.add(handle)
        return replace(place, storage=known)

    def _load_storage(self, data: Any) -> Storage | TypedStorage:
        """Read torch's legacy format: five pickles (magic number, version, system, storage, keys), a count, the
        content.
        """
        _require(isinstance(data, memoryview), "the bytes of a storage")
        headers: list[tuple[StorageClass, str, int]] = []

        def resolve(persistent_id: Any) -> None:
            _require(isinstance(persistent_id, tuple) and len(persistent_id) == 6, "a persistent id")
            tag, kind, key, _, count, view = persistent_id
            _require(tag == "storage" and isinstance(kind, StorageClass) and isinstance(key, str), "a persistent id")
            _require(view is None, "a storage that is not a view")
            headers.append((kind, key, _number(count)))

        reader = PayloadReader(data, self._admitted, self._budget, resolve)
        magic, version, system = reader.read(), reader.read(), reader.read()
        _require(type(magic) is int and magic == _LEGACY_MAGIC and version == _LEGACY_PROTOCOL, "torch's legacy format")
        _require(isinstance(system, dict) and system.get("little_endian") is True, "little-endian content")
        reader.read()
        keys = reader.read()
        _require(len(headers) == 1, "one storage")
        kind, key, count = headers[0]
        _require(isinstance(keys, list) and len(keys) == 1 and keys[0] == key, "the key of one storage")
        content = data[reader.position :]
        _require(len(content) >= _COUNT.size and _COUNT.unpack(content[: _COUNT.size])[0] == count, "a storage's size")
        content = content[_COUNT.size :]
        _require(len(content) == count * (kind.dtype.itemsize if kind.dtype else 1), "a storage's content")
        storage = InlineStorage(content)
        return storage if kind.dtype is None else TypedStorage(storage, kind.dtype)


def _constants() -> dict[tuple[str, str], Any]:
    constants: dict[tuple[str, str], Any] = {
        ("torch", "Tensor"): TensorClass(),
        ("torch.nn.parameter", "Parameter"): TensorClass(),
        ("torch.storage", "UntypedStorage"): StorageClass(),
        ("torch.storage", "TypedStorage"): StorageClass(),
        ("torch", "UntypedStorage"): StorageClass(),
        ("types", "SimpleNamespace"): FLATTENED_METADATA,  # for clients that do without the sglang package
        ("multiprocessing.resource_sharer", "DupFd"): RecordType("DupFd", frozenset({"_id"})),
    }
    constants |= {("torch", "Size"): Function(_size, is_plain=True)}
    constants |= {("torch", name): dtype for name, dtype in DTYPES.items()}
    constants |= {("torch", name): StorageClass(dtype) for name, dtype in _LEGACY_STORAGES.items()}
    for module in _BUCKET_MODULES:
        constants[module, FLATTENED_METADATA.name] = FLATTENED_METADATA
        constants[module, FLATTENED_BUCKET.name] = FLATTENED_BUCKET
    for module in _LOCAL_MODULES:
        constants[_SGLANG + module, LOCAL_TENSOR.name] = LOCAL_TENSOR
    return constants


def _whole(value: Any, reader: PayloadReader, data: bytes | memoryview) -> Any:
    """Return the value of a pickle that must fill `data`."""
    if reader.position != len(data):
        raise WeightRequestError("the payload has bytes after its pickle")
    return value


# --- what the functions of the table make -----------------------------------------------------------------------


def _no_hooks(*arguments: Any) -> None:
    _require(not arguments, "an empty OrderedDict")


def _size(sizes: Any) -> tuple[Any, ...]:
    _require(isinstance(sizes, tuple), "a shape")
    size: tuple[Any, ...] = sizes
    return size


def _rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> TensorPlace:
    _require(hooks is None and not metadata, "a tensor without hooks and flags")
    return _place(storage, None, size, stride, offset)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorPlace:
    _require(hooks is None and not metadata, "a tensor without hooks and flags")
    return _place(storage, _dtype(dtype), size, stride, offset)


def _rebuild_parameter(tensor: Any, requires_grad: Any, hooks: Any) -> TensorPlace:
    _require(isinstance(tensor, TensorPlace) and hooks is None, "a parameter without hooks")
    place: TensorPlace = tensor
    return place


def _rebuild_shared_tensor(kind: Any, storage: Any, metadata: Any) -> TensorPlace:
    _require(isinstance(kind, TensorClass) and isinstance(metadata, tuple) and len(metadata) == 4, "a shared tensor")
    offset, size, stride, _ = metadata
    return _place(storage, None, size, stride, offset)


def _typed_storage(storage: Any, dtype: Any) -> TypedStorage:
    return TypedStorage(_storage(storage), _dtype(dtype))


def _typed_storage_child(storage: Any, kind: Any) -> TypedStorage:
    _require(isinstance(kind, StorageClass) and kind.dtype is not None, "a typed storage")
    return TypedStorage(_storage(storage), kind.dtype)


def _empty_storage(kind: Any) -> Storage:
    _require(isinstance(kind, StorageClass), "a storage class")
    return InlineStorage(memoryview(b""))


def _shared_by_descriptor(*_: Any) -> None:
    raise WeightRequestError(
        "the sender shares CPU tensors by file descriptor, which needs a common parent process. In the sender, call "
        "torch.multiprocessing.set_sharing_strategy('file_system') before pickling, or send safetensors."
    )


def _rebuild_cuda_tensor(*arguments: Any) -> TensorPlace:
    """Rebuild from fifteen arguments of torch's function; the device is an index or, from SGLang's clients, a UUID."""
    _require(len(arguments) == 15, "a CUDA tensor")
    kind, size, stride, offset, storage_kind, dtype, device = arguments[:7]
    memory, nbytes, offset_bytes, _, counter, counter_offset, event, must_sync = arguments[7:]
    _require(isinstance(kind, TensorClass) and isinstance(storage_kind, StorageClass), "a CUDA tensor")
    _require(type(device) in (int, str), "a CUDA device")
    if memory is None or nbytes == 0:
        return _place(TypedStorage(InlineStorage(memoryview(b"")), _dtype(dtype)), None, size, stride, offset)
    handle = CudaHandle(
        device=device,
        memory=bytes(_short(memory, max_handle_bytes(_number(nbytes)))),
        nbytes=_number(nbytes),
        offset_bytes=_number(offset_bytes),
        counter=bytes(_short(counter)),
        counter_offset=_number(counter_offset),
        event=bytes(_short(event)),
        event_sync_required=bool(must_sync),
    )
    return _place(CudaStorage(handle), _dtype(dtype), size, stride, offset)


_NO_TENSORS = _constants()
"""Names that may come where no tensor may."""


# --- checks -----------------------------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    """Return whether a value is immutable, can be compared, and is no part of a tensor."""
    if type(value) is tuple:
        return all(type(item) is int for item in value)
    return type(value) in (str, int, torch.dtype, RecordType) or (type(value) is Function and value.is_plain)


def _place(storage: Any, dtype: torch.dtype | None, size: Any, stride: Any, offset: Any) -> TensorPlace:
    if isinstance(storage, TypedStorage):
        storage, dtype = storage.storage, dtype or storage.dtype
    _require(dtype is not None and isinstance(size, tuple) and isinstance(stride, tuple), "a tensor")
    return place_tensor(_storage(storage), _dtype(dtype), size, stride, offset)


def _storage(value: Any) -> Storage:
    _require(isinstance(value, (InlineStorage, SegmentStorage, CudaStorage)), "a storage")
    storage: Storage = value
    return storage


def _dtype(value: Any) -> torch.dtype:
    _require(isinstance(value, torch.dtype), "a dtype")
    dtype: torch.dtype = value
    return dtype


def _number(value: Any) -> int:
    _require(type(value) is int and 0 <= value < 2**48, "a size")
    number: int = value
    return number


def _short(value: Any, max_bytes: int = _MAX_NAME_BYTES) -> Sequence[int] | memoryview:
    _require(isinstance(value, memoryview) and len(value) <= max_bytes, "a handle")
    content: memoryview = value
    return content


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise WeightRequestError(f"malformed payload: {what} was expected")

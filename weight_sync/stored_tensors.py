"""Tensors as a payload describes them: a place in a storage, checked before a byte of it is read.

    StoredTensor = name + dtype, shape, stride, first byte + Storage
    Storage      = bytes of the payload | shared memory | memory of another process on a CUDA device
    StoredPart   = the layout of a bucket + the stretches of storages that fill it

Everything is checked against the storage's size when it is made.  Parts know storages by number alone, so that a call
which comes again in other storages is read by the same ones.

Shapes are torch's own; sizes are in bytes where they say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from weight_sync.errors import WeightRequestError
from weight_sync.held_memory import Areas
from weight_sync.shared_segment import SharedSegment
from weight_sync.tensor_meta import (
    DTYPES,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_NAME_LENGTH,
    BucketLayout,
    PackedBucket,
    TensorMeta,
    dtype_name,
)

PART_BYTES = 16 << 20
"""Bytes of a bucket at most, unless one tensor has more: few enough to stay in a processor's cache."""
_JOINED_BYTES = 1 << 20
"""Stretches of other storages up to this size are copied into one bucket: a bucket costs more than the copy."""
_ALIGNMENT = 64


class Storage(Protocol):
    """Bytes somewhere.  `has_views`: `read` needs no room for them.  `device`: where they are read."""

    @property
    def nbytes(self) -> int: ...

    @property
    def has_views(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def read(self, start: int, stop: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """Return bytes [start, stop) as uint8 [stop - start]: a view, valid until the storage is released, or a copy in
        `room`, where it is given.
        """


@dataclass(frozen=True)
class InlineStorage:
    """Bytes of the payload itself."""

    data: memoryview
    has_views = True
    device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int, room: torch.Tensor | None = None) -> torch.Tensor:
        if start == stop:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.data[start:stop], dtype=torch.uint8)


@dataclass(frozen=True)
class SegmentStorage:
    """Shared memory of another process on this machine.  `read` raises `ContentError` if it is short."""

    segment: SharedSegment
    has_views = False
    device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return self.segment.nbytes

    def read(self, start: int, stop: int, room: torch.Tensor | None = None) -> torch.Tensor:
        content = torch.empty(stop - start, dtype=torch.uint8) if room is None else room
        self.segment.read_into(content.numpy().data, start)
        return content


@dataclass(frozen=True)
class TensorPlace:
    """A strided tensor in a storage, from byte `start` on: `shape` and `stride`, in elements, reach no byte outside."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_flat(self) -> bool:
        """One dimension, elements side by side."""
        return len(self.shape) == 1 and self.is_dense

    @property
    def is_dense(self) -> bool:
        """Elements side by side, in row-major order."""
        if self.stride == _dense_stride(self.shape) or self.numel < 2:
            return True
        steps = zip(self.shape, self.stride, _dense_stride(self.shape))
        return all(stride == step for size, stride, step in steps if size > 1)

    @property
    def span(self) -> tuple[int, int]:
        """First byte of the storage that the tensor has, and the one behind its last."""
        if self.numel == 0:
            return self.start, self.start
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.start, self.start + (last + 1) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The length of `span`."""
        return self.span[1] - self.start


@dataclass(frozen=True)
class StoredTensor:
    """A named tensor whose content is still where the sender left it."""

    meta: TensorMeta
    place: TensorPlace


def place_tensor(
    storage: Storage, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int, start: int = 0
) -> TensorPlace:
    """Return a checked `TensorPlace`, `offset` elements behind byte `start`.

    Raises `WeightRequestError` for an unknown dtype or bytes outside the storage.
    """
    if dtype not in DTYPES.values():
        raise WeightRequestError(f"tensors of {dtype_name(dtype)} are not supported")
    if not len(shape) == len(stride) <= MAX_DIMENSIONS:
        raise WeightRequestError(f"a tensor has {len(shape)} sizes and {len(stride)} strides")
    if not all(_is_size(number) for number in (*shape, *stride, offset, start)) or math.prod(shape) > MAX_ELEMENTS:
        raise WeightRequestError("a tensor's sizes, strides or offset are out of range")
    place = TensorPlace(storage, dtype, tuple(shape), tuple(stride), start + offset * dtype.itemsize)
    if place.span[1] > storage.nbytes:
        raise WeightRequestError(f"a tensor reaches byte {place.span[1]} of a storage of {storage.nbytes} bytes")
    return place


def contiguous_place(storage: Storage, dtype: torch.dtype, shape: Sequence[int], start: int) -> TensorPlace:
    """Return a dense tensor at byte `start`, which need not be a multiple of the item size.

    Raises `WeightRequestError` as `place_tensor`.
    """
    return place_tensor(storage, dtype, shape, _dense_stride(shape), 0, start)


def name_tensor(name: object, place: TensorPlace) -> StoredTensor:
    """Give a tensor a name.  Raises `WeightRequestError` unless it is text of 1 to 512 printable characters."""
    if type(name) is not str or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise WeightRequestError(f"a tensor's name must be text of 1 to {MAX_NAME_LENGTH} printable characters")
    return StoredTensor(TensorMeta(name, place.dtype, place.shape), place)


def require_apart(tensors: Sequence[StoredTensor], where: str) -> None:
    """Raise `WeightRequestError` if two tensors of one storage share bytes; empty tensors share none."""
    spans = sorted((*tensor.place.span, tensor.meta.name) for tensor in tensors if tensor.meta.nbytes)
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise WeightRequestError(f"{name} and {other} overlap in {where}")


class Stretch(NamedTuple):
    """Bytes [start, stop) of storage number `storage`, which go to byte `at` of a bucket.

    `strided`: dtype, shape and stride of the tensor in them, if it is not dense; it becomes dense there.
    """

    storage: int
    start: int
    stop: int
    at: int
    strided: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True, eq=False)
class StoredPart:
    """A bucket, and what fills it.  `num_bytes`: of its tensors, or that are read for them, whatever is more."""

    layout: BucketLayout
    stretches: Sequence[Stretch]
    num_bytes: int

    def read(self, storages: Sequence[Storage], memory: Areas) -> PackedBucket:
        """Return the bucket: a view of a storage, or a copy in `memory`.

        Raises `WeightRequestError` for a storage that is too short, and what `Storage.read` raises.
        """
        for stretch in self.stretches:
            if stretch.stop > storages[stretch.storage].nbytes:
                raise WeightRequestError(
                    f"a tensor reaches byte {stretch.stop} of a storage of {storages[stretch.storage].nbytes} bytes"
                )
        first, *others = self.stretches
        storage = storages[first.storage]
        if storage.has_views and not others and first.strided is None:
            return PackedBucket(self.layout, storage.read(first.start, first.stop))
        area = memory.take(0, max(self.layout.num_bytes, 1), storage.device)
        for stretch in self.stretches:
            _fill(area, stretch, storages[stretch.storage])
        return PackedBucket(self.layout, area[: self.layout.num_bytes])


def _fill(area: torch.Tensor, stretch: Stretch, storage: Storage) -> None:
    """Copy a stretch to its place in `area`, uint8."""
    if stretch.strided is None:
        room = area[stretch.at : stretch.at + stretch.stop - stretch.start]
        content = storage.read(stretch.start, stretch.stop, room)
        if content is not room:
            room.copy_(content)
        return
    dtype, shape, stride = stretch.strided
    content = storage.read(stretch.start, stretch.stop)
    if content.data_ptr() % dtype.itemsize or content.storage_offset() % dtype.itemsize:  # empty ones have no address
        content = content.clone()
    room = area[stretch.at : stretch.at + math.prod(shape) * dtype.itemsize]
    room.view(dtype).view(shape).copy_(content.view(dtype).as_strided(shape, stride))


def check_total(parts: Sequence[StoredPart], max_bytes: int) -> int:
    """Return the bytes of all parts.  Raises `WeightRequestError` if they exceed `max_bytes`."""
    total = sum(part.num_bytes for part in parts)
    if total > max_bytes:
        raise WeightRequestError(f"the call has {total} bytes of tensors; the limit is {max_bytes}")
    return total


def storages_of(tensors: Sequence[StoredTensor]) -> list[Storage]:
    """Return the storages of the tensors, each once, in the order in which `parts_of` numbers them."""
    return list({id(tensor.place.storage): tensor.place.storage for tensor in tensors}.values())


def parts_of(tensors: Sequence[StoredTensor]) -> list[StoredPart]:
    """Cut tensors, in order, into buckets of at most `PART_BYTES`, or one tensor.

    Tensors that follow one another in a storage are read together.  Short runs of several storages share a bucket.
    """
    numbers = {id(storage): number for number, storage in enumerate(storages_of(tensors))}
    groups: list[list[list[StoredTensor]]] = []
    room, kind = 0, None
    for run in _runs(tensors):
        size, is_short = aligned(_size_of(run)), _size_of(run) <= _JOINED_BYTES
        joins = is_short and size <= room and type(run[0].place.storage) is kind
        if not joins:
            groups.append([])
            room = PART_BYTES if is_short else 0
        groups[-1].append(run)
        room, kind = room - size, type(run[0].place.storage)
    return [_part_of(runs, numbers) for runs in groups]


def _part_of(runs: Sequence[Sequence[StoredTensor]], numbers: dict[int, int]) -> StoredPart:
    metas, offsets, stretches, end, num_bytes = [], [], [], 0, 0
    for run in runs:
        at, first, start = aligned(end), run[0].place, run[0].place.start
        metas += [tensor.meta for tensor in run]
        offsets += [at + tensor.place.start - start for tensor in run]
        strided = None if first.is_dense else (first.dtype, first.shape, first.stride)
        stretches.append(Stretch(numbers[id(first.storage)], start, run[-1].place.span[1], at, strided))
        end = at + _size_of(run)
        num_bytes += sum(max(tensor.meta.nbytes, tensor.place.num_bytes) for tensor in run)
    return StoredPart(BucketLayout(metas, offsets, end), stretches, num_bytes)


def _runs(tensors: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Yield dense tensors that follow one another in a storage, with at most `PART_BYTES`, and others by themselves."""
    run: list[StoredTensor] = []
    end = 0
    for tensor in tensors:
        start, stop = tensor.place.span
        is_dense = tensor.place.is_dense
        follows = bool(run) and is_dense and tensor.place.storage is run[0].place.storage and start >= end
        if run and not (follows and run[0].place.is_dense and stop - run[0].place.start <= PART_BYTES):
            yield run
            run = []
        run.append(tensor)
        end = stop
    if run:
        yield run


def _size_of(run: Sequence[StoredTensor]) -> int:
    """Return the bytes of a bucket that a run takes."""
    return run[-1].place.span[1] - run[0].place.start if run[0].place.is_dense else run[0].meta.nbytes


def aligned(nbytes: int) -> int:
    """Return a number of bytes rounded up, so that the next tensor of any dtype may follow."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number <= MAX_ELEMENTS


def _dense_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of sizes that are not checked yet: garbage in gives garbage that `place_tensor` refuses."""
    if len(shape) > MAX_DIMENSIONS or not all(_is_size(size) for size in shape):
        return (-1,) * len(shape)
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return tuple(min(step, MAX_ELEMENTS) for step in stride)

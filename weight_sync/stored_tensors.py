"""Tensors as a payload describes them: a place in a storage, checked before a byte of it is read.

    StoredTensor = name + dtype, shape, stride, first byte + Storage
    Storage      = bytes of the payload | shared memory | memory of another process on a CUDA device

Everything is checked against the storage's size when it is made; content is read in parts of a few tensors.

Shapes are torch's own; sizes are in bytes where they say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weight_sync.errors import WeightRequestError
from weight_sync.shared_segment import SharedSegment
from weight_sync.tensor_meta import (
    DTYPES,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_NAME_LENGTH,
    TensorMeta,
    dtype_name,
)

PART_BYTES = 16 << 20
"""Bytes of a storage that are read at once: few enough to stay in a processor's cache between two passes."""


class Storage(Protocol):
    """Bytes somewhere."""

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes [start, stop) as uint8 [stop - start]: a view or a copy, valid until the storage is released."""


@dataclass(frozen=True)
class InlineStorage:
    """Bytes of the payload itself; `read` gives views."""

    data: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> torch.Tensor:
        if start == stop:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.data[start:stop], dtype=torch.uint8)


@dataclass(frozen=True)
class SegmentStorage:
    """Shared memory of another process on this machine; `read` copies.  Raises `ContentError` if it is short."""

    segment: SharedSegment

    @property
    def nbytes(self) -> int:
        return self.segment.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        content = torch.empty(stop - start, dtype=torch.uint8)
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
        return len(self.shape) == 1 and (self.numel < 2 or self.stride == (1,))

    @property
    def span(self) -> tuple[int, int]:
        """First byte of the storage that the tensor has, and the one behind its last."""
        if self.numel == 0:
            return self.start, self.start
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.start, self.start + (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor:
    """A named tensor whose content is still where the sender left it."""

    meta: TensorMeta
    place: TensorPlace

    def within(self, content: torch.Tensor, start: int) -> torch.Tensor:
        """Return the tensor, where `content` are bytes of its storage from `start` on; a copy if it is not aligned
        there.
        """
        first, stop = self.place.span
        content = content[first - start : stop - start]
        size = self.place.dtype.itemsize
        if content.data_ptr() % size or content.storage_offset() % size:  # empty ones have no address
            content = content.clone()
        return content.view(self.place.dtype).as_strided(self.place.shape, self.place.stride)


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


def check_total(tensors: Sequence[StoredTensor], max_bytes: int) -> None:
    """Raise `WeightRequestError` if the tensors, or the bytes that must be read for them, exceed `max_bytes`."""
    spans = [tensor.place.span for tensor in tensors]
    total = max(sum(tensor.meta.nbytes for tensor in tensors), sum(stop - start for start, stop in spans))
    if total > max_bytes:
        raise WeightRequestError(f"the call has {total} bytes of tensors; the limit is {max_bytes}")


def read_in_parts(tensors: Sequence[StoredTensor]) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
    """Yield buckets of tensors that follow one another in one storage, each read at once: at most `PART_BYTES`, or one
    tensor.  Staged tensors apart, never more than one part is held.
    """
    for part in _parts(tensors):
        start = part[0].place.start
        content = part[0].place.storage.read(start, part[-1].place.span[1])
        yield [(tensor.meta.name, tensor.within(content, start)) for tensor in part]


def _parts(tensors: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    part: list[StoredTensor] = []
    end = 0
    for tensor in tensors:
        start, stop = tensor.place.span
        follows = bool(part) and tensor.place.storage is part[0].place.storage and start >= end
        if part and not (follows and stop - part[0].place.start <= PART_BYTES):
            yield part
            part = []
        part.append(tensor)
        end = stop
    if part:
        yield part


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

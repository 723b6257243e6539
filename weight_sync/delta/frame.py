"""A delta frame: the changes of many tensors in one run of bytes, which a broadcast and a file carry alike.

    "LKSDELT2" | u32 packed, u32 unpacked bytes of the list | u32 packed bytes of the sizes | u32 tensors
               | u64 packed bytes of each plane | base digest, digest, 32 bytes each
               | list | sizes | fingerprints | five planes
                  list          zstd of JSON: name, dtype and shape of each tensor
                  sizes         zstd; of each tensor, how its planes are read (`planes.write_sizes`)
                  fingerprints  base and result of each tensor, u64 each
                  planes        see `planes`; zstd each, over all tensors: small tensors share one table of codes

Numbers are little-endian.  Every tensor is fenced by its base fingerprint and proved by its result fingerprint; the
digests belong to the whole versions, of which a frame may be a part.  The list is the same bytes in each delta of a
sender, so a receiver need not read it twice.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_sync.delta.changes import Changes, apply_changes
from weight_sync.delta.compression import Unpacker, compress, decompress_exactly
from weight_sync.delta.planes import (
    PLANES,
    SIZES_BYTES,
    SizeTable,
    invert_planes,
    read_all_planes,
    read_sizes,
    write_sizes,
)
from weight_sync.delta.tensor_list import KnownLists, TensorList, read_json
from weight_sync.errors import BaseMismatchError, ContentError, WeightRequestError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.tensor_meta import TensorMeta, dtype_name

MAGIC = b"LKSDELT2"
_OLD_MAGIC = b"LKSDELT1"  # of release 0.2.0, whatever the version of this package is
MAX_INDEX_BYTES = 64 << 20
_HEAD = struct.Struct("<8sIIII5Q32s32s")
_FINGERPRINT_BYTES = 16
_UNPACKED_BYTES = 256 << 10
"""The bytes of planes that are unpacked at once, unless one tensor has more."""


@dataclass(frozen=True, eq=False)
class FrameEntry:
    """One tensor of a frame; `sizes`: its row of the table."""

    meta: TensorMeta
    sizes: SizeTable
    base_fingerprint: int
    result_fingerprint: int

    def check(self, before: int, after: int) -> None:
        """Compare the fingerprints found with the stated ones.  Raises `BaseMismatchError`, `ContentError`."""
        if before != self.base_fingerprint:
            stated, here = fingerprint_hex(self.base_fingerprint), fingerprint_hex(before)
            raise BaseMismatchError(
                f"{self.meta.name}: the delta starts from fingerprint {stated}, but this engine has {here}"
            )
        if after != self.result_fingerprint:
            stated, there = fingerprint_hex(self.result_fingerprint), fingerprint_hex(after)
            raise ContentError(f"{self.meta.name}: the fingerprint after the delta is {there}, expected {stated}")


@dataclass(frozen=True)
class TensorDelta:
    """The delta of one tensor: its entry and its parts of the planes."""

    entry: FrameEntry
    planes: tuple[np.ndarray, ...]

    def changes(self) -> Changes:
        """Read the tensor's changes from its parts of the planes.  Raises `ContentError`."""
        meta = self.entry.meta
        try:
            return read_all_planes(self.entry.sizes, self.planes, np.array([meta.numel]), meta.dtype.itemsize)
        except ContentError as error:
            raise ContentError(f"{meta.name}: {error}") from None

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """Return the new content, on the device of `base`, which is all of the tensor.

        Raises `BaseMismatchError` unless `base` is what the delta starts from, `ContentError`.
        """
        meta, name = self.entry.meta, self.entry.meta.name
        if base.dtype != meta.dtype or tuple(base.shape) != meta.shape:
            here = f"{dtype_name(base.dtype)} {list(base.shape)}"
            raise BaseMismatchError(
                f"{name}: the delta holds {dtype_name(meta.dtype)} {list(meta.shape)}, but this engine has {here}"
            )
        before = fingerprint(base)
        tensor, after = apply_changes(base, self.changes(), before)
        self.entry.check(before, after)
        return tensor


@dataclass(frozen=True, eq=False)
class DeltaFrame:
    """A frame whose index was read and checked; its planes are still packed.

    `fingerprints`: of base and result, uint64 [T, 2].  `base_digest`, `digest`: of the whole versions on both sides, 64
    hex digits.
    """

    tensors: TensorList
    sizes: SizeTable
    fingerprints: np.ndarray
    base_digest: str
    digest: str
    packed: Sequence[bytes | memoryview]  # of PLANES

    @property
    def metas(self) -> Sequence[TensorMeta]:
        return self.tensors.metas

    @property
    def num_changes(self) -> int:
        return int(self.sizes.num_changes.sum())

    def entry(self, at: int) -> FrameEntry:
        """Return one tensor by its place in the list."""
        return FrameEntry(self.metas[at], self.sizes.some(slice(at, at + 1)), *self.fingerprints[at].tolist())

    def deltas(self) -> Iterator[TensorDelta]:
        """Yield the deltas one by one; memory holds only the ones that the caller keeps.  Raises `ContentError`."""
        for first, last, planes in self._unpacked():
            parts = cut_planes(self.sizes.some(slice(first, last)), planes)
            for at, part in zip(range(first, last), parts, strict=True):
                yield TensorDelta(self.entry(at), part)

    def chosen_planes(self, chosen: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Return the planes of some tensors end to end, uint8 each, for each of several choices, bool [T].

        Raises `ContentError`.
        """
        found: list[list[list[np.ndarray]]] = [[[] for _ in PLANES] for _ in chosen]
        for first, last, planes in self._unpacked():
            for columns, mask in zip(found, chosen, strict=True):
                some = mask[first:last]
                for at, plane in enumerate(planes) if some.any() else ():
                    counts = self.sizes.counts[first:last, at]
                    columns[at].append(plane if some.all() else plane[np.repeat(some, counts)])
        nothing = np.empty(0, dtype=np.uint8)
        return [[np.concatenate([nothing, *parts]) for parts in columns] for columns in found]

    def invert(self) -> DeltaFrame:
        """Return the inverse frame: applied to the result it gives the base.  Raises `ContentError`."""
        inverted: list[list[np.ndarray]] = [[] for _ in PLANES]
        for delta in self.deltas():
            planes = invert_planes(delta.entry.sizes, delta.planes, delta.entry.meta.dtype.itemsize)
            for column, plane in zip(inverted, planes, strict=True):
                column.append(plane)
        turned = np.ascontiguousarray(self.fingerprints[:, ::-1])
        return DeltaFrame(self.tensors, self.sizes, turned, self.digest, self.base_digest, pack_planes(inverted))

    def _unpacked(self) -> Iterator[tuple[int, int, list[np.ndarray]]]:
        """Yield runs of tensors, first and last plus one, and their planes."""
        unpackers = [Unpacker(packed, f"delta plane {name!r}") for packed, name in zip(self.packed, PLANES)]
        for first, last in _runs(self.sizes.counts.sum(1)):
            counts = self.sizes.counts[first:last].sum(0).tolist()
            taken = (unpacker.take(count) for unpacker, count in zip(unpackers, counts, strict=True))
            yield first, last, [np.frombuffer(plane, dtype=np.uint8) for plane in taken]
        for unpacker in unpackers:
            unpacker.finish()


def cut_planes(sizes: SizeTable, planes: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
    """Cut planes that lie end to end into the parts of each tensor."""
    ends = np.cumsum(sizes.counts, axis=0)
    for starts, stops in zip((ends - sizes.counts).tolist(), ends.tolist(), strict=True):
        yield tuple(plane[start:stop] for plane, start, stop in zip(planes, starts, stops, strict=True))


def write_frame(frame: DeltaFrame) -> bytes:
    """Return the bytes of a frame."""
    packed_list, packed_sizes = frame.tensors.packed, compress(write_sizes(frame.sizes), level=3)
    counts = len(packed_list), len(frame.tensors.written), len(packed_sizes), len(frame.metas)
    digests = bytes.fromhex(frame.base_digest), bytes.fromhex(frame.digest)
    head = _HEAD.pack(MAGIC, *counts, *map(len, frame.packed), *digests)
    return b"".join([head, packed_list, packed_sizes, frame.fingerprints.astype("<u8").tobytes(), *frame.packed])


def read_frame(data: bytes | memoryview, max_bytes: int | None, known: KnownLists | None = None) -> DeltaFrame:
    """Read and check the index of a frame of tensors of at most `max_bytes` in all; None: the caller compares each.

    The planes stay views of `data`.  `known`: keeps lists of tensors.  Raises `ContentError` if the bytes are not a
    frame, `WeightRequestError` for tensors that are out of range.
    """
    view = memoryview(data)
    if bytes(view[:8]) == _OLD_MAGIC:
        raise ContentError(
            "the delta frame has the form of release 0.2.0; install this engine's package for the sender, too"
        )
    if len(view) < _HEAD.size or bytes(view[:8]) != MAGIC:
        raise ContentError("the data is not a delta frame: it does not begin with the magic bytes")
    _, list_bytes, listed_bytes, size_bytes, count, *plane_bytes, base, result = _HEAD.unpack(view[: _HEAD.size])
    start, end = _HEAD.size + list_bytes, _HEAD.size + list_bytes + size_bytes
    position = end + _FINGERPRINT_BYTES * count
    if listed_bytes > MAX_INDEX_BYTES or position > len(view):
        raise ContentError(f"a delta frame of {len(view)} bytes cannot have an index of {listed_bytes}")
    tensors = _tensors(view[_HEAD.size : start], listed_bytes, known)
    if len(tensors.metas) != count:
        raise ContentError(f"a delta frame lists {len(tensors.metas)} tensors and states {count}")
    sizes = read_sizes(decompress_exactly(view[start:end], count * SIZES_BYTES, "sizes of a delta frame"), count)
    *edges, stop = itertools.accumulate(plane_bytes, initial=position)
    if stop != len(view):
        raise ContentError(f"a delta frame of {len(view)} bytes states a size of {stop}")
    if max_bytes is not None and tensors.num_bytes > max_bytes:
        raise WeightRequestError(
            f"the delta has {tensors.num_bytes} bytes of tensors; one call may have at most {max_bytes}"
        )
    sizes.check(tensors.names, tensors.numels, tensors.itemsizes)
    fingerprints = np.frombuffer(view[end:position], dtype="<u8").reshape(-1, 2)
    packed = [view[first : first + size] for first, size in zip(edges, plane_bytes, strict=True)]
    return DeltaFrame(tensors, sizes, fingerprints, base.hex(), result.hex(), packed)


def _tensors(packed: memoryview, num_bytes: int, known: KnownLists | None) -> TensorList:
    """Read the list of a frame, unless it is known."""
    key = hashlib.sha256(packed).digest()

    def read() -> TensorList:
        return TensorList.of(read_json(decompress_exactly(packed, num_bytes, "index of a delta frame")), key)

    return read() if known is None else known(key, read)


def pack_planes(columns: Sequence[Sequence[np.ndarray]], level: int = 1) -> tuple[bytes, ...]:
    """Return the planes of a frame, each of whose parts lie end to end; `level`: zstd's."""
    nothing = np.empty(0, dtype=np.uint8)
    return tuple(compress(np.concatenate([nothing, *column]).data, level) for column in columns)


def _runs(num_bytes_T: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield runs of at most `_UNPACKED_BYTES` of planes, or one tensor: first and last plus one."""
    ends_T, first = np.cumsum(num_bytes_T), 0
    while first < len(ends_T):
        limit = ends_T[first] - num_bytes_T[first] + _UNPACKED_BYTES
        last = max(int(np.searchsorted(ends_T, limit, side="right")), first + 1)
        yield first, last
        first = last

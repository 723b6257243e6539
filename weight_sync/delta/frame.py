"""A delta frame: the changes of many tensors in one run of bytes, which a broadcast and a file carry alike.

    "LKSDELT1" | u32 packed, u32 unpacked bytes of the index | index | fingerprints | five planes
                  index         zstd of JSON: tensors, sizes of the planes, digests
                  fingerprints  base and result of each tensor, u64 each
                  planes        see `planes`; zstd each, over all tensors: small tensors share one table of codes

Numbers are little-endian.  Every tensor is fenced by its base fingerprint and proved by its result fingerprint; the
digests belong to the whole versions, of which a frame may be a part.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from weight_sync.delta.changes import Changes, apply_changes
from weight_sync.delta.compression import Unpacker, compress, decompress_exactly
from weight_sync.delta.planes import PLANES, PlaneSizes, invert_planes, read_planes, write_planes
from weight_sync.errors import BaseMismatchError, ContentError, WeightRequestError
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.tensor_meta import MetaParser, TensorMeta, dtype_name

MAGIC = b"LKSDELT1"
MAX_INDEX_BYTES = 64 << 20
_HEAD = struct.Struct("<8sII")
_DIGEST_DIGITS = 64
_UNPACKED_BYTES = 256 << 10
"""The bytes of planes that are unpacked at once, unless one tensor has more."""


@dataclass(frozen=True)
class FrameEntry:
    """One tensor of a frame."""

    meta: TensorMeta
    sizes: PlaneSizes
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
            return read_planes(self.entry.sizes, self.planes, meta.numel, meta.dtype.itemsize)
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


@dataclass(frozen=True)
class DeltaFrame:
    """A frame whose index was read and checked; its planes are still packed.

    `base_digest`, `digest`: of the whole versions on both sides, 64 hex digits.
    """

    entries: tuple[FrameEntry, ...]
    base_digest: str
    digest: str
    packed: tuple[bytes | memoryview, ...]  # of PLANES

    @property
    def metas(self) -> list[TensorMeta]:
        return [entry.meta for entry in self.entries]

    @property
    def num_changes(self) -> int:
        return sum(entry.sizes.num_changes for entry in self.entries)

    def open(self) -> dict[str, TensorDelta]:
        """Return the deltas of the tensors by name, in order, planes unpacked.  Raises `ContentError`."""
        return {delta.entry.meta.name: delta for delta in self.deltas()}

    def deltas(self) -> Iterator[TensorDelta]:
        """Yield the deltas one by one; memory holds only the ones that the caller keeps.  Raises `ContentError`."""
        for entry, planes in self._planes():
            yield TensorDelta(entry, tuple(planes))

    def invert(self) -> DeltaFrame:
        """Return the inverse frame: applied to the result it gives the base.  Raises `ContentError`."""
        inverted: list[list[np.ndarray]] = [[] for _ in PLANES]
        for entry, planes in self._planes():
            for plane, part in zip(inverted, invert_planes(entry.sizes, planes, entry.meta.dtype.itemsize)):
                plane.append(part)
        entries = tuple(
            replace(entry, base_fingerprint=entry.result_fingerprint, result_fingerprint=entry.base_fingerprint)
            for entry in self.entries
        )
        return DeltaFrame(entries, self.digest, self.base_digest, _pack_planes(inverted))

    def _planes(self) -> Iterator[tuple[FrameEntry, list[np.ndarray]]]:
        unpackers = [Unpacker(packed, f"delta plane {name!r}") for packed, name in zip(self.packed, PLANES)]
        for entries in _runs(self.entries):
            columns = []
            for unpacker, counts in zip(unpackers, zip(*(entry.sizes.counts for entry in entries)), strict=True):
                plane = np.frombuffer(unpacker.take(sum(counts)), dtype=np.uint8)
                ends = itertools.accumulate(counts)
                columns.append([plane[end - count : end] for end, count in zip(ends, counts)])
            for entry, *parts in zip(entries, *columns, strict=True):
                yield entry, parts
        for unpacker in unpackers:
            unpacker.finish()


def make_frame(
    parts: Sequence[tuple[TensorMeta, Changes, int, int]], base_digest: str, digest: str, level: int = 1
) -> DeltaFrame:
    """Make a frame of (meta, changes, base fingerprint, result fingerprint) in the order given; `level`: zstd's."""
    entries = []
    columns: list[list[np.ndarray]] = [[] for _ in PLANES]
    for meta, changes, base_fingerprint, result_fingerprint in parts:
        sizes, planes = write_planes(changes, meta.numel, meta.dtype.itemsize)
        entries.append(FrameEntry(meta, sizes, base_fingerprint, result_fingerprint))
        for column, plane in zip(columns, planes, strict=True):
            column.append(plane)
    return DeltaFrame(tuple(entries), base_digest, digest, _pack_planes(columns, level))


def write_frame(frame: DeltaFrame) -> bytes:
    """Return the bytes of a frame."""
    described = {
        "base_digest": frame.base_digest,
        "digest": frame.digest,
        "packed": [len(packed) for packed in frame.packed],
        "tensors": [
            [
                entry.meta.name,
                dtype_name(entry.meta.dtype),
                list(entry.meta.shape),
                entry.sizes.num_changes,
                entry.sizes.is_dense,
                list(entry.sizes.counts),
            ]
            for entry in frame.entries
        ],
    }
    index = json.dumps(described, separators=(",", ":")).encode()
    packed_index = compress(index, level=3)
    fingerprints = np.array([(e.base_fingerprint, e.result_fingerprint) for e in frame.entries], dtype="<u8")
    head = _HEAD.pack(MAGIC, len(packed_index), len(index))
    return b"".join([head, packed_index, fingerprints.tobytes(), *frame.packed])


def read_frame(data: bytes | memoryview, max_bytes: int | None) -> DeltaFrame:
    """Read and check the index of a frame of tensors of at most `max_bytes` in all; None: the caller compares each.

    The planes stay views of `data`.  Raises `ContentError` if the bytes are not a frame, `WeightRequestError` for
    tensors that are out of range.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size or bytes(view[:8]) != MAGIC:
        raise ContentError("the data is not a delta frame: it does not begin with the magic bytes")
    _, packed_bytes, index_bytes = _HEAD.unpack(view[: _HEAD.size])
    if index_bytes > MAX_INDEX_BYTES or packed_bytes > len(view) - _HEAD.size:
        raise ContentError(f"a delta frame of {len(view)} bytes cannot have an index of {index_bytes}")
    position = _HEAD.size + packed_bytes
    index = _read_json(decompress_exactly(view[_HEAD.size : position], index_bytes, "index of a delta frame"))
    described, packed_sizes = index["tensors"], index["packed"]
    fingerprints_end = position + 16 * len(described)
    if fingerprints_end + sum(packed_sizes) != len(view):
        raise ContentError(
            f"a delta frame of {len(view)} bytes states a size of {fingerprints_end + sum(packed_sizes)}"
        )
    fingerprints = np.frombuffer(view[position:fingerprints_end], dtype="<u8").reshape(-1, 2).tolist()
    parse = MetaParser()
    entries = tuple(_entry(parse, item, *values) for item, values in zip(described, fingerprints, strict=True))
    _check_entries(entries, max_bytes)
    packed = []
    position = fingerprints_end
    for size in packed_sizes:
        packed.append(view[position : position + size])
        position += size
    return DeltaFrame(entries, index["base_digest"], index["digest"], tuple(packed))


def _pack_planes(columns: Sequence[Sequence[np.ndarray]], level: int = 1) -> tuple[bytes, ...]:
    nothing = np.empty(0, dtype=np.uint8)
    return tuple(compress(np.concatenate([nothing, *column]).data, level) for column in columns)


def _runs(entries: Sequence[FrameEntry]) -> Iterator[list[FrameEntry]]:
    """Cut entries, in order, into runs of at most `_UNPACKED_BYTES` of planes, or one entry."""
    run: list[FrameEntry] = []
    filled = 0
    for entry in entries:
        num_bytes = sum(entry.sizes.counts)
        if run and filled + num_bytes > _UNPACKED_BYTES:
            yield run
            run, filled = [], 0
        run.append(entry)
        filled += num_bytes
    if run:
        yield run


def _read_json(text: bytes) -> dict[str, Any]:
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContentError(f"the index of a delta frame is not JSON: {str(error)[:200]}") from None
    keys = {"base_digest", "digest", "packed", "tensors"}
    if not isinstance(index, dict) or index.keys() != keys:
        raise ContentError("the index of a delta frame lacks a required entry")
    packed, tensors = index["packed"], index["tensors"]
    right = (
        isinstance(tensors, list)
        and isinstance(packed, list)
        and len(packed) == len(PLANES)
        and all(map(_is_size, packed))
        and all(_is_digest(index[key]) for key in ("base_digest", "digest"))
    )
    if not right:
        raise ContentError("the index of a delta frame lacks a required entry")
    return index


def _entry(parse: MetaParser, item: Any, base_fingerprint: int, result_fingerprint: int) -> FrameEntry:
    if not isinstance(item, list) or len(item) != 6:
        raise ContentError("the description of a tensor in a delta frame is malformed")
    name, dtype, shape, num_changes, is_dense, counts = item
    if not (
        isinstance(shape, list)
        and _is_size(num_changes)
        and isinstance(is_dense, bool)
        and isinstance(counts, list)
        and len(counts) == len(PLANES)
        and all(map(_is_size, counts))
    ):
        raise ContentError(f"the description of tensor {str(name)[:200]!r} in a delta frame is malformed")
    meta = parse(name, dtype, shape)
    try:
        sizes = PlaneSizes.check(num_changes, is_dense, counts, meta.numel, meta.dtype.itemsize)
    except ContentError as error:
        raise ContentError(f"{meta.name}: {error}") from None
    return FrameEntry(meta, sizes, base_fingerprint, result_fingerprint)


def _check_entries(entries: Sequence[FrameEntry], max_bytes: int | None) -> None:
    total = sum(entry.meta.nbytes for entry in entries)
    if max_bytes is not None and total > max_bytes:
        raise WeightRequestError(f"the delta has {total} bytes of tensors; one call may have at most {max_bytes}")
    if len({entry.meta.name for entry in entries}) != len(entries):
        raise ContentError("a delta frame holds a tensor twice")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == _DIGEST_DIGITS and not set(value) - set("0123456789abcdef")

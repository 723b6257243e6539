"""Receives tensors as one safetensors file in memory: the bytes in the call itself, or in shared memory by name.

The form without pickle.  The header is read here and not by the `safetensors` package, which copies every tensor out of
the bytes: here each is a view of them, or read once from shared memory.  Accepted is what the package writes; the tests
compare the two on right and wrong files.

    8 bytes: length n of the header | n bytes: JSON {name: {dtype, shape, data_offsets}} | content, without gaps

Knows the format.  Does not know models or transactions.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from weight_sync.errors import WeightRequestError
from weight_sync.shared_segment import SharedSegment
from weight_sync.stored_tensors import (
    InlineStorage,
    SegmentStorage,
    Storage,
    StoredTensor,
    check_total,
    contiguous_place,
    name_tensor,
    read_in_parts,
)
from weight_sync.tensor_meta import SAFETENSORS_DTYPES, TensorMeta

MAX_HEADER_BYTES = 16 << 20
UNLINK_PREFIX = "lockstep_"
"""Of names that a call may have removed: other shared memory of this machine is none of its business."""
_LENGTH = struct.Struct("<Q")


class SafetensorsSource:
    """One call's tensors: `content` is the file, or the segment that holds it.

    A segment is read and left alone; with `unlink` its name, which must begin with `UNLINK_PREFIX`, is removed once it
    is read, or refused after it was found to be a safetensors file.
    """

    must_drain = False

    def __init__(self, content: bytearray | SharedSegment, *, unlink: bool = False) -> None:
        self._content = content
        self._tensors: Sequence[StoredTensor] = ()
        self._unlink = unlink
        self._release: Callable[[], object] = _nothing

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """Every tensor of the file.  Raises `WeightRequestError`."""
        tensors = self._parse()
        try:
            check_total(tensors, max_bytes)
        except WeightRequestError:
            self._release()
            raise
        self._tensors = tensors
        return [tensor.meta for tensor in tensors]

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        """A few tensors a bucket.

        Raises `ContentError` (shared memory ends early), `WeightRequestError` (it is gone).
        """
        try:
            yield from read_in_parts(self._tensors)
        finally:
            self._tensors = ()
            self._release()

    def refuse(self, reason: str) -> None:
        """The call failed: remove the segment's name now if that was asked for."""
        self._tensors = ()
        if self._unlink and self._release is _nothing:
            with suppress(WeightRequestError):
                self._parse()
        self._release()

    def _parse(self) -> Sequence[StoredTensor]:
        tensors = parse_safetensors(self._storage())
        if self._unlink and isinstance(self._content, SharedSegment):
            self._release = weakref.finalize(self, self._content.unlink)
        return tensors

    def _storage(self) -> Storage:
        if not isinstance(self._content, SharedSegment):
            return InlineStorage(memoryview(self._content))
        name = self._content.name
        if self._unlink and not name.removeprefix("/").startswith(UNLINK_PREFIX):
            raise WeightRequestError(f"shm_unlink is for names that begin with {UNLINK_PREFIX!r}, not {name[:200]!r}")
        self._content.check()
        return SegmentStorage(self._content)


def parse_safetensors(storage: Storage) -> list[StoredTensor]:
    """The tensors of a safetensors file, in the order of their content.  Raises `WeightRequestError`."""
    if storage.nbytes < _LENGTH.size:
        raise WeightRequestError("not a safetensors file: it is shorter than its first number")
    (length,) = _LENGTH.unpack(storage.read(0, _LENGTH.size).numpy().tobytes())
    if length > MAX_HEADER_BYTES or length > storage.nbytes - _LENGTH.size:
        raise WeightRequestError(f"not a safetensors file: a header of {length} bytes in {storage.nbytes} bytes")
    begin = _LENGTH.size + length
    entries = _read_header(storage.read(_LENGTH.size, begin).numpy().tobytes())
    placed = sorted((_extent(name, entry), name, entry) for name, entry in entries if name != "__metadata__")
    position = 0
    for (start, stop), name, _ in placed:
        if start != position:
            raise WeightRequestError(f"safetensors: {name[:200]!r} does not begin where the tensor before it ends")
        position = stop
    if begin + position != storage.nbytes:
        accounted = str(begin + position)[:40]
        raise WeightRequestError(f"safetensors: {storage.nbytes} bytes came, the header accounts for {accounted}")
    return [_tensor(storage, begin, name, entry) for _, name, entry in placed]


def _read_header(text: bytes) -> list[tuple[str, Any]]:
    """Names and entries, every object of the header checked for names that come twice."""
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WeightRequestError(f"safetensors: the header is not JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise WeightRequestError("safetensors: the header is not an object")
    return list(header.items())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name comes twice")
    return result


def _extent(name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(number) is not int for number in offsets):
        raise WeightRequestError(f"safetensors: {name[:200]!r} has no data_offsets")
    if not 0 <= offsets[0] <= offsets[1]:
        raise WeightRequestError(f"safetensors: {name[:200]!r} lies nowhere: its offsets are out of order")
    return offsets[0], offsets[1]


def _tensor(storage: Storage, begin: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise WeightRequestError(
            f"safetensors: {name[:200]!r} has dtype {str(dtype)[:64]!r}; known: {list(SAFETENSORS_DTYPES)}"
        )
    if not isinstance(shape, list):
        raise WeightRequestError(f"safetensors: {name[:200]!r} has no shape")
    start, stop = entry["data_offsets"]
    tensor = name_tensor(name, contiguous_place(storage, SAFETENSORS_DTYPES[dtype], shape, begin + start))
    if tensor.meta.nbytes != stop - start:
        raise WeightRequestError(f"safetensors: {name!r} has {tensor.meta.nbytes} bytes, its place {stop - start}")
    return tensor


def _nothing() -> None:
    """What is let go where nothing is held."""

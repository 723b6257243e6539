"""Frames as versions before 2 wrote them, which folders on a disk may still hold.

    "LKSDELT1" | u32 packed, u32 unpacked bytes of the index | index | fingerprints | five planes
                  index         zstd of JSON: tensors, sizes of the planes, digests
                  fingerprints  as in `frame`

The index has all that `frame` writes in the head, the list and the sizes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weight_sync.delta.compression import decompress_exactly
from weight_sync.delta.planes import PLANES, PlaneSizes, SizeTable
from weight_sync.delta.tensor_list import TensorList, read_json
from weight_sync.errors import ContentError

OLD_MAGIC = b"LKSDELT1"
_HEAD = struct.Struct("<8sII")
_DIGEST_DIGITS = 64


class FrameIndex(NamedTuple):
    """The statements of a frame before its fingerprints, which begin at byte `end`.  `packed`: bytes of each plane."""

    tensors: TensorList
    sizes: SizeTable
    base_digest: str
    digest: str
    packed: Sequence[int]
    end: int


def read_old_index(view: memoryview, max_index_bytes: int) -> FrameIndex:
    """Read the index of a frame.  Raises `ContentError`, `WeightRequestError` for tensors that are out of range."""
    if len(view) < _HEAD.size:
        raise ContentError(f"a delta frame of {len(view)} bytes states a size of {_HEAD.size}")
    _, packed_bytes, index_bytes = _HEAD.unpack(view[: _HEAD.size])
    if index_bytes > max_index_bytes or packed_bytes > len(view) - _HEAD.size:
        raise ContentError(f"a delta frame of {len(view)} bytes cannot have an index of {index_bytes}")
    end = _HEAD.size + packed_bytes
    index = read_json(decompress_exactly(view[_HEAD.size : end], index_bytes, "index of a delta frame"))
    keys = {"base_digest", "digest", "packed", "tensors"}
    if not isinstance(index, dict) or index.keys() != keys:
        raise ContentError("the index of a delta frame lacks a required entry")
    packed, described = index["packed"], index["tensors"]
    right = (
        isinstance(described, list)
        and isinstance(packed, list)
        and len(packed) == len(PLANES)
        and all(map(_is_size, packed))
        and all(_is_digest(index[key]) for key in ("base_digest", "digest"))
    )
    if not right:
        raise ContentError("the index of a delta frame lacks a required entry")
    sizes = SizeTable.of([_sizes(item) for item in described])
    tensors = TensorList.of([item[:3] for item in described])
    tensors = replace(tensors, key=hashlib.sha256(tensors.written).digest())
    return FrameIndex(tensors, sizes, index["base_digest"], index["digest"], packed, end)


def _sizes(item: Any) -> PlaneSizes:
    if not isinstance(item, list) or len(item) != 6:
        raise ContentError("the description of a tensor in a delta frame is malformed")
    name, _, shape, num_changes, is_dense, counts = item
    if not (
        isinstance(shape, list)
        and _is_size(num_changes)
        and isinstance(is_dense, bool)
        and isinstance(counts, list)
        and len(counts) == len(PLANES)
        and all(map(_is_size, counts))
    ):
        raise ContentError(f"the description of tensor {str(name)[:200]!r} in a delta frame is malformed")
    return PlaneSizes(num_changes, is_dense, tuple(counts))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == _DIGEST_DIGITS and not set(value) - set("0123456789abcdef")

"""Reads what a control call says about tensors: names, dtype names, shapes, manifests.

Everything that comes from outside is checked here once; the rest of the library works on `TensorMeta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weight_sync.errors import WeightRequestError
from weight_sync.fingerprint import parse_fingerprint
from weight_sync.tensor_meta import DTYPES, TensorMeta

Manifest = Sequence[tuple[TensorMeta, int | None]]  # fingerprint None: not stated

_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 2**48


def parse_dtype(text: str) -> torch.dtype:
    """`"bfloat16"` or `"torch.bfloat16"`.  Raises `WeightRequestError` for a name that is not in `DTYPES`."""
    dtype = DTYPES.get(text.removeprefix("torch.")) if isinstance(text, str) else None
    if dtype is None:
        raise WeightRequestError(f"unknown dtype {text!r}; known: {', '.join(DTYPES)}")
    return dtype


def parse_meta(name: str, dtype: str, shape: Sequence[int]) -> TensorMeta:
    """One announced tensor.  Raises `WeightRequestError` for a bad dtype name, a negative or an absurd size."""
    if not isinstance(name, str) or not name:
        raise WeightRequestError(f"a tensor name must be non-empty text, got {name!r}")
    sizes = tuple(shape)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise WeightRequestError(f"{name}: sizes must be whole numbers of at least 0, got {list(sizes)}")
    meta = TensorMeta(name, parse_dtype(dtype), sizes)
    if len(sizes) > _MAX_DIMENSIONS or meta.numel > _MAX_ELEMENTS:
        raise WeightRequestError(f"{name}: shape {list(sizes)} is out of range")
    return meta


def parse_metas(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorMeta]:
    """The three parallel lists of `update_weights_from_distributed`.  Raises `WeightRequestError`."""
    if not len(names) == len(dtypes) == len(shapes):
        raise WeightRequestError(
            f"names, dtypes and shapes must be equally long, got {len(names)}, {len(dtypes)} and {len(shapes)}"
        )
    return [parse_meta(*item) for item in zip(names, dtypes, shapes, strict=True)]


def parse_manifest(entries: Iterable[Mapping[str, Any]]) -> list[tuple[TensorMeta, int | None]]:
    """Entries with `name`, `dtype`, `shape` and optionally `fingerprint` (16 hex digits).

    Raises `WeightRequestError`.
    """
    manifest = []
    for entry in entries:
        absent = [key for key in ("name", "dtype", "shape") if entry.get(key) is None]
        if absent:
            raise WeightRequestError(f"a manifest entry lacks {', '.join(absent)}: {dict(entry)!r}")
        text = entry.get("fingerprint")
        meta = parse_meta(entry["name"], entry["dtype"], entry["shape"])
        manifest.append((meta, None if text is None else parse_fingerprint(text)))
    return manifest

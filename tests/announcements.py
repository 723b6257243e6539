"""A sender's announcements of tensors before it sends them: in the call of a broadcast bucket, and in a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.tensor_meta import dtype_name

Named = Sequence[tuple[str, torch.Tensor]]


def bucket_fields(named: Named, group_name: str, load_format: str | None) -> dict[str, Any]:
    """Return the fields of `update_weights_from_distributed`."""
    return {
        "names": [name for name, _ in named],
        "dtypes": [dtype_name(tensor.dtype) for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
        "group_name": group_name,
        "load_format": load_format,
    }


def manifest_in_lists(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the manifest of `manifest_of` as one object of lists."""
    entries = manifest_of(named)
    lists = {f"{name}s": [entry[name] for entry in entries] for name in ("name", "dtype", "shape")}
    return lists | {"fingerprints": "".join(entry["fingerprint"] for entry in entries)}


def manifest_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Return a manifest: one entry for each tensor, with its fingerprint."""
    return [
        {
            "name": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "fingerprint": fingerprint_hex(fingerprint(tensor)),
        }
        for name, tensor in named
    ]

"""Delta folders as SkyRL's publisher writes them, by its own packages: nothing of `weight_sync` is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from safetensors.numpy import save_file

Tensors = Mapping[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def write_delta(
    source: Path, version: int, old: Tensors, new: Tensors, *, base_version: int | None = None, num_files: int = 2
) -> Path:
    """Write `SOURCE/delta-%08d` of the tensors that differ; return the folder."""
    folder = source / f"delta-{version:08d}"
    folder.mkdir(parents=True)
    changed = [name for name in new if not np.array_equal(raw(old[name]), raw(new[name]))]
    files: dict[str, dict[str, np.ndarray]] = {f"payload-{number:05d}.safetensors": {} for number in range(num_files)}
    entries = []
    for number, name in enumerate(changed):
        payload = zstandard.ZstdCompressor().compress((raw(old[name]) ^ raw(new[name])).tobytes())
        file_name, key = f"payload-{number % num_files:05d}.safetensors", f"{number:06d}"
        files[file_name][key] = np.frombuffer(payload, dtype=np.uint8)
        entries.append(
            {
                "name": name,
                "dtype": str(new[name].dtype).removeprefix("torch."),
                "shape": list(new[name].shape),
                "uncompressed_num_bytes": raw(new[name]).size,
                "compressed_num_bytes": len(payload),
                "payload_file": file_name,
                "payload_key": key,
                "checksum": xxhash.xxh3_128(raw(new[name]).data).hexdigest(),
                "checksum_algorithm": "xxh3-128",
            }
        )
    for file_name, payloads in files.items():
        save_file(payloads, folder / file_name)
    manifest = {
        "version": version,
        "base_version": version - 1 if base_version is None else base_version,
        "tensors": entries,
        "payload_files": list(files),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def change_manifest(folder: Path, **changes: Any) -> None:
    """Replace fields of a manifest."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_entry(folder: Path, **changes: Any) -> None:
    """Replace fields of the first tensor in a manifest."""
    first, *others = json.loads((folder / "manifest.json").read_text())["tensors"]
    change_manifest(folder, tensors=[first | changes, *others])

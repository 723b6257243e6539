"""The trainer's side of delta folders: publishes versions that appear whole or not at all.

publish_bytes    xor or overwrite, as slime's and miles' receivers read them too
publish_encoded  ulp-gap, from a `DeltaEncoder`
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from weight_sync.checkpoint_folder import INDEX_FILE
from weight_sync.delta.byte_patches import DEFAULT_CHECKSUM, ENCODERS, checksum, require_checksum
from weight_sync.delta.durable import sync_folder, write_new
from weight_sync.delta.encoder import EncodedDelta
from weight_sync.delta.frame import write_frame
from weight_sync.delta.version_dir import FRAME_TENSOR, ULP_GAP, version_path
from weight_sync.errors import CoverageError, TransactionStateError, WeightRequestError
from weight_sync.tensor_meta import tensor_bytes


def publish_bytes(
    source: Path,
    version: int,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    encoding: str = "xor",
    checksum_format: str = DEFAULT_CHECKSUM,
    base_version: int | None = None,
) -> Path:
    """Write `SOURCE/weight_v{version}` with the tensors that differ between `old` and `new`; returns the folder.

    `base_version`: `version` less one, unless given.  Raises `WeightRequestError` for an unknown encoding or checksum,
    `CoverageError`, `TransactionStateError` (published already), `OSError`.
    """
    if encoding not in ENCODERS:
        raise WeightRequestError(f"unknown delta_encoding {encoding!r}; known: {', '.join(ENCODERS)}")
    require_checksum(checksum_format)
    if old.keys() != new.keys():
        raise CoverageError("a delta and its base must hold the same tensors")
    payloads, sums = {}, {}
    for name, tensor in new.items():
        if not torch.equal(tensor_bytes(old[name]), tensor_bytes(tensor)):
            payload = bytearray(ENCODERS[encoding](old[name], tensor))
            payloads[name] = torch.frombuffer(payload, dtype=torch.uint8)
            sums[name] = checksum(checksum_format, tensor)
    files = [save(payloads, metadata=sums)] if payloads else []
    described = {"delta_encoding": encoding, "compression_format": "zstd", "checksum_format": checksum_format}
    return _publish(source, version, base_version, described, files, [list(payloads)])


def publish_encoded(source: Path, version: int, delta: EncodedDelta, *, base_version: int | None = None) -> Path:
    """Write `SOURCE/weight_v{version}` with the frames of a delta; returns the folder.

    Raises `TransactionStateError` (published already), `OSError`.
    """
    files = []
    for frame in delta.frames:
        content = torch.frombuffer(bytearray(write_frame(frame)), dtype=torch.uint8)
        files.append(save({FRAME_TENSOR: content}))
    described = {
        "delta_encoding": ULP_GAP,
        "compression_format": "zstd",
        "base_digest": delta.base_digest,
        "digest": delta.digest,
    }
    names = [[meta.name for meta in frame.metas] for frame in delta.frames]
    return _publish(source, version, base_version, described, files, names)


def _publish(
    source: Path,
    version: int,
    base_version: int | None,
    described: dict[str, str],
    files: Sequence[bytes],
    names: Sequence[Sequence[str]],
) -> Path:
    target = version_path(source, version)
    if target.exists():
        raise TransactionStateError(f"{target} is published already")
    base = version - 1 if base_version is None else base_version
    weight_map = {}
    source.mkdir(parents=True, exist_ok=True)
    temporary = source / f".{target.name}.{os.getpid()}"
    temporary.mkdir()
    try:
        for number, (content, tensors) in enumerate(zip(files, names)):
            file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write_new(temporary / file_name, [content])
            weight_map.update(dict.fromkeys(tensors, file_name))
        metadata = {"version": f"{version:06d}", "base_version": f"{base:06d}", **described}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map})
        write_new(temporary / INDEX_FILE, [index.encode()])
        sync_folder(temporary)
        temporary.rename(target)
        sync_folder(source)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target

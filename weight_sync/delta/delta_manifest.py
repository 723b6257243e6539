"""Delta folders as SkyRL publishes them: `SOURCE/delta-00000007/`, each a delta of an earlier version.

    manifest.json    version, base_version, payload_files, and of each tensor that changes: name, dtype, shape,
                     payload_file, payload_key, compressed_num_bytes, uncompressed_num_bytes, checksum,
                     checksum_algorithm
    a payload file   safetensors; under each payload_key, as U8, the zstd frame of new ^ old

The checksum is of the new content.  Only such folders have a manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weight_sync.checkpoint_folder import is_plain_name
from weight_sync.delta.byte_patches import CHECKSUMS
from weight_sync.delta.published import BytePatch, VersionFolder
from weight_sync.errors import ContentError, WeightRequestError
from weight_sync.safetensors_file import FileTensor, SafetensorsFile, read_header, read_small, unique_keys
from weight_sync.tensor_meta import TensorMeta, parse_meta

MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 256 << 20
_ENCODING = "xor"


class PayloadFile(NamedTuple):
    """A file, and its tensors by payload key."""

    file: SafetensorsFile
    payloads: Mapping[str, FileTensor]


class ManifestPatch(NamedTuple):
    """The patch of a tensor that must be `meta` in the base."""

    meta: TensorMeta
    patch: BytePatch


def delta_path(source: Path, version: int) -> Path:
    """Return `SOURCE/delta-00000007`."""
    return source / f"delta-{version:08d}"


def read_delta_folder(source: Path, version: int) -> VersionFolder:
    """Read a delta folder's own description.  Raises as `read_manifest_patches`."""
    path = delta_path(source, version)
    content, manifest = _read(path)
    stated, base = (_number(path, manifest, key) for key in ("version", "base_version"))
    if stated != version or base >= version:
        raise ContentError(f"{path / MANIFEST} states version {stated} on base {base}")
    return VersionFolder(path, version, base, _ENCODING, None, hashlib.sha256(content).hexdigest(), has_manifest=True)


def read_manifest_patches(folder: VersionFolder) -> dict[str, ManifestPatch]:
    """Return the patches of a delta folder by name, all checked against the headers of their files; none is unpacked.

    Raises `ContentError` for a folder that is damaged or points outside of itself, `WeightRequestError` for a form that
    is not known, `TransportError`.
    """
    path = folder.path
    _, manifest = _read(path)
    listed, tensors = manifest.get("payload_files"), manifest.get("tensors")
    if not isinstance(tensors, list) or not isinstance(listed, list):
        raise ContentError(f"{path / MANIFEST} lacks its tensors or payload_files")
    files = {str(name): _payload_file(path, name) for name in listed}
    found: dict[str, ManifestPatch] = {}
    for entry in tensors:
        each = _patch(path, entry, files)
        if each.meta.name in found:
            raise ContentError(f"{path / MANIFEST} holds {each.meta.name} twice")
        found[each.meta.name] = each
    return found


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    content = read_small(path / MANIFEST, _MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(content, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ContentError(f"{path / MANIFEST} is not JSON: {str(error)[:200]}") from None
    if not isinstance(manifest, dict):
        raise ContentError(f"{path / MANIFEST} is not an object")
    return content, manifest


def _number(path: Path, manifest: Mapping[str, Any], key: str) -> int:
    value = manifest.get(key)
    if type(value) is not int or not 0 <= value < 10**12:
        raise ContentError(f"{path / MANIFEST}: {key} is {str(value)[:64]!r}")
    return value


def _payload_file(path: Path, name: object) -> PayloadFile:
    """Read the header of a payload file.  Raises `ContentError` for one outside of the folder."""
    if not isinstance(name, str) or not is_plain_name(name):
        raise ContentError(f"{path / MANIFEST}: payload file {str(name)[:200]!r} must be in the same folder")
    if not (path / name).resolve().is_relative_to(path.resolve()):
        raise ContentError(f"{path / name} points outside its folder")
    file = read_header(path / name)
    return PayloadFile(file, {tensor.meta.name: tensor for tensor in file.tensors})


def _patch(path: Path, entry: Any, files: Mapping[str, PayloadFile]) -> ManifestPatch:
    where = path / MANIFEST
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        raise ContentError(f"{where}: the description of a tensor is malformed")
    try:
        meta = parse_meta(entry.get("name", ""), entry.get("dtype", ""), entry["shape"])
    except WeightRequestError as error:
        raise ContentError(f"{where}: {error}") from None
    file_name, key, algorithm, stated = (
        entry.get(field) for field in ("payload_file", "payload_key", "checksum_algorithm", "checksum")
    )
    if not isinstance(algorithm, str) or algorithm not in CHECKSUMS:
        known = ", ".join(CHECKSUMS)
        raise WeightRequestError(f"{where}: unknown checksum_algorithm {str(algorithm)[:64]!r}; known: {known}")
    if not isinstance(stated, str):
        raise ContentError(f"{where}: {meta.name} has no checksum")
    found = files.get(file_name) if isinstance(file_name, str) else None
    if found is None:
        raise ContentError(f"{where}: {meta.name} is in {str(file_name)[:200]!r}, which payload_files does not list")
    payload = found.payloads.get(key) if isinstance(key, str) else None
    if payload is None or payload.meta.dtype != torch.uint8 or len(payload.meta.shape) != 1:
        raise ContentError(f"{found.file.path} has no payload {str(key)[:200]!r} for {meta.name}")
    sizes = entry.get("compressed_num_bytes"), entry.get("uncompressed_num_bytes")
    if sizes != (payload.meta.nbytes, meta.nbytes):
        raise ContentError(f"{where}: {meta.name} has sizes {sizes}, expected {payload.meta.nbytes}, {meta.nbytes}")
    return ManifestPatch(meta, BytePatch(meta.name, found.file, payload, _ENCODING, algorithm, stated))

"""Published weight versions: `SOURCE/weight_v000007/`, each a full checkpoint folder or a delta of an earlier version.

    weight_v000007/model.safetensors.index.json    metadata: version, base_version, delta_encoding, compression_format,
                                                   checksum_format; weight_map: tensor name -> file
                  /model-00000-of-00002.safetensors
                       xor, overwrite   a U8 payload under each tensor's name; __metadata__: its checksum when applied
                       ulp-gap          one U8 tensor `frame`, see `frame`; it carries its own fingerprints

The first two encodings are slime's and miles'.  A folder without `delta_encoding` is a full version.  Where there is no
folder of this name, `SOURCE/delta-00000007/` is looked for: see `delta_manifest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weight_sync.checkpoint_folder import INDEX_FILE, open_checkpoint_folder, read_index
from weight_sync.delta.byte_patches import APPLIERS, require_checksum
from weight_sync.delta.delta_manifest import delta_path, read_delta_folder, read_manifest_patches
from weight_sync.delta.frame import DeltaFrame, TensorDelta, read_frame
from weight_sync.delta.published import BytePatch, VersionFolder
from weight_sync.errors import BaseMismatchError, ContentError, WeightRequestError
from weight_sync.safetensors_file import (
    SafetensorsFile,
    open_regular,
    read_at,
    read_header,
)
from weight_sync.tensor_meta import TensorMeta, dtype_name

ULP_GAP = "ulp-gap"
FRAME_TENSOR = "frame"
MAX_VERSION = 10**12
_COMPRESSION = "zstd"
_IDENTITY_BYTES = 4096  # of the content


def version_path(source: Path, version: int) -> Path:
    """Return `SOURCE/weight_v000007`."""
    return source / f"weight_v{version:06d}"


def read_version(source: Path, version: int) -> VersionFolder:
    """Read a published version's own description.

    Raises `WeightRequestError` when it is missing or in a form that is not known, `ContentError` when it is damaged or
    lies outside of `source`.
    """
    path = version_path(source, version)
    if not path.is_dir() and delta_path(source, version).is_dir():
        path = delta_path(source, version)
    if not path.is_dir():
        raise WeightRequestError(f"published weight version missing: {path}")
    if not path.resolve().is_relative_to(source.resolve()):
        raise ContentError(f"{path} points outside {source}")
    if path == delta_path(source, version):
        return read_delta_folder(source, version)
    metadata: dict[str, Any] = {}
    if (path / INDEX_FILE).exists():
        metadata = read_index(path)[0]
    if "delta_encoding" not in metadata:
        if "base_version" in metadata:
            raise ContentError(f"{path / INDEX_FILE} names a base_version but no delta_encoding")
        return VersionFolder(path, version, None, None, None, _identity(open_checkpoint_folder(path).files))
    stated, base = (_number(path, metadata, key) for key in ("version", "base_version"))
    if stated != version or base >= version:
        raise ContentError(f"{path / INDEX_FILE} states version {stated} on base {base}")
    compression = metadata.get("compression_format")
    if compression != _COMPRESSION:
        raise WeightRequestError(f"{path}: unknown compression_format {str(compression)[:64]!r}; known: {_COMPRESSION}")
    encoding, checksum_format = metadata["delta_encoding"], None
    if encoding in APPLIERS:
        checksum_format = require_checksum(metadata.get("checksum_format"))
    elif encoding != ULP_GAP:
        known = ", ".join([*APPLIERS, ULP_GAP])
        raise WeightRequestError(f"{path}: unknown delta_encoding {str(encoding)[:64]!r}; known: {known}")
    return VersionFolder(path, version, base, encoding, checksum_format, _identity(_delta_files(path)))


def patched_names(folder: VersionFolder) -> set[str]:
    """Return the names of the tensors that a delta version changes.

    Checks that every file of its index, and no other, is there and whole.  Nothing is unpacked.  Raises
    `WeightRequestError`, `ContentError`, `TransportError`.
    """
    assert not folder.is_full, folder
    if folder.has_manifest:
        return set(read_manifest_patches(folder))
    weight_map = read_index(folder.path)[1]
    homes: dict[str, str] = {}
    for file in _delta_files(folder.path):
        for name in _frame_names(file) if folder.encoding == ULP_GAP else _byte_patches(file, folder):
            if name in homes:
                raise ContentError(f"{folder.path}: {name} is in two files")
            homes[name] = file.path.name
    if homes != weight_map:
        odd = sorted(name for name in homes.keys() | weight_map.keys() if homes.get(name) != weight_map.get(name))
        raise ContentError(f"{folder.path}: {INDEX_FILE} and the files disagree on {', '.join(odd[:10])}")
    return set(homes)


def read_patches(folder: VersionFolder, metas: Mapping[str, TensorMeta]) -> Iterator[tuple[str, TensorPatch]]:
    """Yield the patches of a delta version, tensor by tensor, in any order; one of them is unpacked at a time.

    `metas`: what the base version has; what a patch unpacks is bounded by it.  Raises as `patched_names`.
    """
    if folder.has_manifest:
        yield from _manifest_patches(folder, metas)
        return
    for file in _delta_files(folder.path):
        found = _frame_patches(file, metas) if folder.encoding == ULP_GAP else _byte_patches(file, folder).items()
        for name, patch in found:
            if name not in metas:
                raise ContentError(f"{file.path}: the base has no tensor {name}")
            yield name, patch


def chain_of(
    source: Path, target: int, stop: Callable[[int], bool]
) -> tuple[list[VersionFolder], VersionFolder | None, int]:
    """Return the deltas that lead to `target`, in order; the full version that they start from, or None; its number.

    Goes back from `target` until `stop(version)` is true of one, or a full version is found; version 0
    is never read: it is the engine's own checkpoint.  Raises as `read_version`.
    """
    deltas: list[VersionFolder] = []
    version = target
    while not stop(version) and version != 0:
        folder = read_version(source, version)
        if folder.base_version is None:
            return deltas[::-1], folder, version
        deltas.append(folder)
        version = folder.base_version
    return deltas[::-1], None, version


def _byte_patches(file: SafetensorsFile, folder: VersionFolder) -> dict[str, TensorPatch]:
    assert folder.encoding is not None and folder.checksum_format is not None
    patches: dict[str, TensorPatch] = {}
    for tensor in file.tensors:
        name = tensor.meta.name
        if tensor.meta.dtype != torch.uint8 or len(tensor.meta.shape) != 1:
            raise ContentError(f"{file.path}: {name} is not a delta")
        if name not in file.metadata:
            raise ContentError(f"{file.path}: {name} has no checksum")
        patches[name] = BytePatch(name, file, tensor, folder.encoding, folder.checksum_format, file.metadata[name])
    return patches


def _manifest_patches(folder: VersionFolder, metas: Mapping[str, TensorMeta]) -> Iterator[tuple[str, TensorPatch]]:
    for name, (meta, patch) in read_manifest_patches(folder).items():
        if metas.get(name) != meta:
            raise ContentError(f"{folder.path}: {_described(meta)}, which its base does not have")
        yield name, patch


def _frame_names(file: SafetensorsFile) -> list[str]:
    try:
        return [meta.name for meta in _read_frame(file).metas]
    except WeightRequestError as error:
        raise ContentError(f"{file.path}: {error}") from None


def _frame_patches(file: SafetensorsFile, metas: Mapping[str, TensorMeta]) -> Iterator[tuple[str, TensorPatch]]:
    try:
        frame = _read_frame(file)
        for meta in frame.metas:
            if metas.get(meta.name) != meta:
                raise ContentError(f"{_described(meta)}, which its base does not have")
        for delta in frame.deltas():
            yield delta.entry.meta.name, _FramePatch(file.path, delta)
    except WeightRequestError as error:
        raise ContentError(f"{file.path}: {error}") from None


def _described(meta: TensorMeta) -> str:
    return f"{meta.name}: the delta changes {dtype_name(meta.dtype)} {list(meta.shape)}"


def _read_frame(file: SafetensorsFile) -> DeltaFrame:
    if [meta.name for meta in file.metas] != [FRAME_TENSOR] or file.metas[0].dtype != torch.uint8:
        raise ContentError("it does not hold one delta frame")
    with open_regular(file.path) as opened:
        content = read_at(opened, file.path, file.tensors[0].start, file.metas[0].nbytes)
    return read_frame(content.numpy().data, None)


@dataclass(frozen=True)
class _FramePatch:
    path: Path
    delta: TensorDelta

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """Apply the delta to `base` and return the new content.

        Raises `BaseMismatchError` for a wrong base, `ContentError`.
        """
        try:
            return self.delta.apply(base)
        except (ContentError, BaseMismatchError) as error:
            raise type(error)(f"{self.path}: {error}") from None


TensorPatch = BytePatch | _FramePatch
"""The way from a tensor of the base version to the same tensor of a version."""


def _number(path: Path, metadata: dict[str, Any], key: str) -> int:
    """Return the number under `key`; slime writes `"000007"`."""
    value = metadata.get(key)
    digits = str(value) if type(value) in (int, str) else ""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise ContentError(f"{path / INDEX_FILE}: {key} is {str(value)[:64]!r}")
    return int(digits)


def _delta_files(path: Path) -> tuple[SafetensorsFile, ...]:
    """Return the headers of the files that the index names; no other is there."""
    named = set(read_index(path)[1].values())
    present = {item.name for item in path.glob("*.safetensors")}
    if named != present:
        odd = sorted(named ^ present)
        raise ContentError(f"{path}: {INDEX_FILE} and the files there differ in {', '.join(odd[:10])}")
    for name in named:
        if not (path / name).resolve().is_relative_to(path.resolve()):
            raise ContentError(f"{path / name} points outside its folder")
    return tuple(read_header(path / name) for name in sorted(named))


def _identity(files: Sequence[SafetensorsFile]) -> str:
    """Hash names, sizes, headers, which hold the checksums of deltas, and the beginning of the content."""
    lines = []
    for file in files:
        with open_regular(file.path) as opened:
            header = read_at(opened, file.path, 0, min(file.nbytes, file.content_start + _IDENTITY_BYTES))
        lines.append(f"{file.path.name} {file.nbytes} {hashlib.sha256(header.numpy().data).hexdigest()}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()

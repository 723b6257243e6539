"""A checkpoint folder in Hugging Face format: which files, which tensors, and whether they are whole."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_sync.errors import ContentError, WeightRequestError
from weight_sync.safetensors_file import (
    FileStamp,
    RawHeader,
    SafetensorsFile,
    read_raw_header,
    read_small,
    unique_keys,
)
from weight_sync.tensor_meta import TensorMeta

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OF_OTHERS = ("consolidated", "adapter_")  # names of Mistral's own form of the same weights, and of LoRA adapters
_SHARD = re.compile(r".*-\d+-of-(?P<total>\d+)\.safetensors")
MAX_INDEX_BYTES = 256 << 20
_TICK_S = 0.02


@dataclass(frozen=True)
class RawFolder:
    """The index and headers of a folder, read and not parsed.  `index`: its index, if it has one."""

    path: Path
    headers: tuple[RawHeader, ...]
    index: bytes | None
    index_stamp: FileStamp | None

    @property
    def digest(self) -> bytes:
        """The digest of all that `parse` depends on, but for the path."""
        found = hashlib.sha256(b"" if self.index is None else hashlib.sha256(self.index).digest())
        for header in self.headers:
            found.update(header.digest + hashlib.sha256(header.path.name.encode()).digest())
        return found.digest()

    def parse(self) -> CheckpointFolder:
        """Parse and check all headers.

        Raises `ContentError` for one that is damaged, for a tensor that is in two files, or that is not where the index
        puts it.
        """
        files = tuple(header.parse() for header in self.headers)
        homes = homes_of(files)
        for name, file_name in ({} if self.index is None else parse_index(self.path, self.index)[1]).items():
            if homes.get(name) is None or homes[name].path.name != file_name:
                raise ContentError(f"{self.path / file_name} has no tensor {name}, though {INDEX_FILE} lists it there")
        return CheckpointFolder(self, files)

    def require_unchanged(self) -> None:
        """Raise `ContentError` if a file was written or replaced since the folder was read.

        The tensors that were read may then be a mixture.
        """
        stamps = {header.path: header.stamp for header in self.headers} | {self.path / INDEX_FILE: self.index_stamp}
        for path, stamp in stamps.items():
            if _stamp(path) != stamp:
                raise ContentError(f"{path} changed while {self.path} was read; write to another folder and rename it")


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder whose headers were parsed: every tensor in one file only."""

    raw: RawFolder
    files: tuple[SafetensorsFile, ...]

    @property
    def path(self) -> Path:
        return self.raw.path

    @property
    def metas(self) -> list[TensorMeta]:
        return [meta for file in self.files for meta in file.metas]


def open_checkpoint_folder(path: Path) -> CheckpointFolder:
    """Read and parse the index and all headers.  Raises as `read_folder` and `RawFolder.parse`."""
    return read_folder(path).parse()


def read_folder(
    path: Path, files_of: Callable[[bytes], Sequence[str]] | None = None, file: str | None = None
) -> RawFolder:
    """Read the index and all headers; or the header of `file` alone, if it is given.

    An index lists its files, which `files_of` returns; by default it is parsed.  Without one it is `model.safetensors`
    alone, or else all `*.safetensors` but those whose names say that they are something else.

    Raises `WeightRequestError` for a folder or file that is missing, `ContentError` for one that is damaged,
    `TransportError`.
    """
    require_folder(path)
    _let_clocks_tick(path)
    index, stamp = None, _stamp(path / INDEX_FILE)
    if file is not None:
        names: Sequence[str] = [file]
    elif stamp is not None:
        index = read_small(path / INDEX_FILE, MAX_INDEX_BYTES)
        names = files_in_index(path, index) if files_of is None else files_of(index)
    else:
        names = _files_without_index(path)
    return RawFolder(path, tuple(read_raw_header(path / name) for name in names), index, stamp)


def files_in_index(path: Path, index: bytes) -> tuple[str, ...]:
    """Return the names of the files that an index lists, sorted.  Raises as `parse_index`, and for one without any."""
    weight_map = parse_index(path, index)[1]
    if not weight_map:
        raise ContentError(f"{path / INDEX_FILE} names no tensor")
    return tuple(sorted(set(weight_map.values())))


def _files_without_index(path: Path) -> list[str]:
    """Return the files that hold the model.  Raises `WeightRequestError` where there is none."""
    found = sorted(item.name for item in path.glob("*.safetensors"))
    if WHOLE_FILE in found:
        return [WHOLE_FILE]
    names = [name for name in found if not name.startswith(_OF_OTHERS)]
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if shards and len(shards) == len(names) and len(names) != int(shards[0]["total"]):
        raise WeightRequestError(
            f"{path} has {len(names)} of the {int(shards[0]['total'])} files named like {names[0]}"
        )
    if names:
        return names
    if found:
        raise WeightRequestError(
            f"{path} has {found[0]}, but neither {WHOLE_FILE} nor {INDEX_FILE}; save the whole model in one folder"
        )
    raise WeightRequestError(f"{path} has no *.safetensors file; convert the checkpoint to safetensors")


def _stamp(path: Path) -> FileStamp | None:
    """Return the stamp of a file; None if its status cannot be read."""
    try:
        return FileStamp.of(path.stat())
    except OSError:
        return None


def _let_clocks_tick(path: Path) -> None:
    """Wait if the folder was just written: two writes within a tick of the file system's clock leave one time."""
    stamps = [stamp for item in path.glob("*") if (stamp := _stamp(item)) is not None]
    age_s = time.time() - max((stamp.changed for stamp in stamps), default=0) / 1e9
    if 0 <= age_s < _TICK_S:
        time.sleep(_TICK_S - age_s)


def require_folder(path: Path) -> None:
    """Raise `WeightRequestError` unless `path` is a readable folder."""
    try:
        found = path.is_dir()
    except (OSError, ValueError) as error:
        raise WeightRequestError(f"{str(path)[:200]!r} cannot be read: {str(error)[:200]}") from None
    if not found:
        raise WeightRequestError(f"{str(path)[:1000]} is not a folder")


def homes_of(files: tuple[SafetensorsFile, ...]) -> dict[str, SafetensorsFile]:
    """Return the file of every tensor.  Raises `ContentError` for a tensor that is in two."""
    homes: dict[str, SafetensorsFile] = {}
    for file in files:
        for meta in file.metas:
            if meta.name in homes:
                raise ContentError(f"{meta.name} is both in {homes[meta.name].path} and in {file.path}")
            homes[meta.name] = file
    return homes


def read_index(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `metadata` and `weight_map` of the folder's index.

    Raises `WeightRequestError` when it is missing, `ContentError` as `parse_index`.
    """
    return parse_index(path, read_small(path / INDEX_FILE, MAX_INDEX_BYTES))


def parse_index(path: Path, content: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `metadata` and `weight_map` of an index in folder `path`.

    Raises `ContentError` when it is damaged or names a file outside.
    """
    try:
        index = json.loads(content, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ContentError(f"{path / INDEX_FILE} is not JSON: {str(error)[:200]}") from None
    metadata = index.get("metadata", {}) if isinstance(index, dict) else None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise ContentError(f"{path / INDEX_FILE} lacks its weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not is_plain_name(file_name):
            raise ContentError(f"{path / INDEX_FILE} must map {name[:200]!r} to the name of a file in the same folder")
    return metadata, weight_map


def is_plain_name(name: str) -> bool:
    """Return whether `name` names a file of a folder and no way out of it."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name

"""Reading a Hugging Face checkpoint folder: which files, which tensors, and whether they are whole.

Knows safetensors with and without an index.  Does not know models.  Every fault of the folder is one line that names
the file and says what to do, found before any tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rollout.core.errors import StartupError
from weight_sync.tensor_meta import SAFETENSORS_DTYPES, TensorMeta

INDEX_FILE = "model.safetensors.index.json"
MAPPED_BYTES = 256 * 2**20  # read from one mapping of a file


@dataclass(frozen=True)
class Shard:
    """One safetensors file and what its header says."""

    path: Path
    metas: tuple[TensorMeta, ...]


def open_checkpoint(model_path: str | Path) -> list[Shard]:
    """The shards of a checkpoint folder, headers read.

    Raises `StartupError` when there is no safetensors file, one that the index names is missing, one is truncated or
    lacks a tensor that the index puts there, or a tensor lies in two of them.
    """
    folder = Path(model_path)
    weight_map = _read_index(folder / INDEX_FILE)
    if weight_map is None:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise StartupError(f"{folder} has no *.safetensors file; convert the checkpoint to safetensors")
    else:
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    shards = [_read_header(path) for path in paths]
    homes: dict[str, str] = {}
    for shard in shards:
        for meta in shard.metas:
            if meta.name in homes:
                raise StartupError(f"{folder}: {meta.name} is both in {homes[meta.name]} and in {shard.path.name}")
            homes[meta.name] = shard.path.name
    for name, file in (weight_map or {}).items():
        if homes.get(name) != file:
            raise StartupError(f"{folder / file} has no tensor {name}, which {INDEX_FILE} puts there; copy both again")
    return shards


def read_tensors(shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one shard, on the CPU, in the order of the header.  Raises `StartupError`.

    A tensor is a view of the mapped file.  The mapping is renewed now and then: what was read of it would otherwise
    count as resident, beside the weights made from it, until the whole file is read.
    """
    try:
        for metas in _runs_of_bytes(shard.metas, MAPPED_BYTES):
            with safe_open(shard.path, framework="pt") as file:
                for meta in metas:
                    yield meta.name, file.get_tensor(meta.name)
    except (SafetensorError, OSError) as error:
        raise _unreadable(shard.path, error) from None


def _runs_of_bytes(metas: Iterable[TensorMeta], limit: int) -> Iterator[list[TensorMeta]]:
    """Consecutive tensors of at most `limit` bytes together, at least one each."""
    run: list[TensorMeta] = []
    size = 0
    for meta in metas:
        if run and size + meta.nbytes > limit:
            yield run
            run, size = [], 0
        run.append(meta)
        size += meta.nbytes
    if run:
        yield run


def _read_index(path: Path) -> dict[str, str] | None:
    if not path.is_file():
        return None
    try:
        content: Any = json.loads(path.read_text())
        weight_map = content["weight_map"]
        plain = all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} cannot be read ({error!r}); copy it again") from None
    if not weight_map or not plain:
        raise StartupError(f"{path} must map every tensor to the name of a file in the same folder")
    return weight_map


def _read_header(path: Path) -> Shard:
    if not path.is_file():
        raise StartupError(f"{path} is missing, which {INDEX_FILE} names; copy it into the folder")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            described = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()]
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None
    for name, dtype, _ in described:
        if dtype not in SAFETENSORS_DTYPES:
            raise StartupError(f"{path}: {name} has dtype {dtype}, which is not supported")
    return Shard(path, tuple(TensorMeta(name, SAFETENSORS_DTYPES[dtype], shape) for name, dtype, shape in described))


def _unreadable(path: Path, error: Exception) -> StartupError:
    return StartupError(f"{path} is truncated or not a safetensors file ({error}); copy it again")

"""`pull`: brings a local checkpoint folder to a published version, crash-safe at every point.

    lock -> finish what a crash left -> plan: nearest start, chain of deltas -> write the new files into next/, verified
         -> state: "applying" -> rename them into place -> state: applied

Before "applying" is written, a failure leaves the old version as it was; afterwards everything that is needed is
flushed to the disk, and the next call (or this one) rolls forward from there, without the source.  The disk must
hold the files that change twice.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from weight_sync.checkpoint_folder import CheckpointFolder, homes_of, open_checkpoint_folder, require_folder
from weight_sync.delta.durable import flush, locked, sync_folder, write_at, write_new
from weight_sync.delta.local_state import (
    LOCK_FILE,
    NEXT_FOLDER,
    SYNC_FOLDER,
    LocalState,
    LocalVersion,
    read_state,
    write_state,
)
from weight_sync.delta.published import VersionFolder
from weight_sync.delta.version_dir import (
    MAX_VERSION,
    chain_of,
    patched_names,
    read_patches,
    read_version,
)
from weight_sync.errors import ContentError, LocalCheckpointError, TransactionStateError, WeightRequestError
from weight_sync.safetensors_file import SafetensorsFile, open_regular, read_at, read_tensor
from weight_sync.tensor_meta import TensorMeta, tensor_bytes

_CHUNK_BYTES = 16 << 20
_SUFFIXES = {".safetensors", ".json", ".model", ".tiktoken", ".jinja"}
_TEXT_FILES = {"merges.txt", "vocab.txt"}
Check = Callable[[Sequence[TensorMeta]], object]


@dataclass(frozen=True)
class PullResult:
    """`start`: what the new version was made from; None: a full checkpoint.  `num_patched`: tensors that changed."""

    version: int
    previous: int | None
    start: int | None
    num_deltas: int
    num_patched: int
    written_bytes: int


def pull(
    local: Path,
    base: Path,
    source: Path,
    target: int,
    *,
    timeout_s: float,
    check: Check | None = None,
) -> PullResult:
    """Bring `local` to version `target` of `source`; version 0 is the checkpoint folder `base`.

    `check`: raises for a full version that cannot be used; without it, one must have the tensors of `base`.
    Starts from what is there where it can, else from the newest full version, else from `base`.  `timeout_s`: how long
    to wait for another process that pulls into the same folder.

    Raises `WeightRequestError`, `ContentError` (damaged, or not on this base), `TransactionStateError` (the lock),
    `TransportError` (reading), `LocalCheckpointError` (writing).  The folder is then at its old version, or, after
    `LocalCheckpointError`, at worst between two, which the next pull settles.
    """
    if not 0 <= target <= MAX_VERSION:
        raise WeightRequestError(f"target_version must be in 0..{MAX_VERSION}, got {target}")
    if "\0" in f"{local}{source}":
        raise WeightRequestError("a path must not contain zero bytes")
    if target > 0:
        require_folder(source)
    try:
        for other in (base, source):
            if local.resolve() == other.resolve() or local.resolve() in other.resolve().parents:
                raise WeightRequestError(f"local_checkpoint_dir {local} is the same as {other} or contains it")
        _make_folder(local)
        with locked(local / SYNC_FOLDER / LOCK_FILE, shared=False, timeout_s=timeout_s):
            state = _recover(local)
            return _pull(local, base, source, target, state.applied, check)
    except OSError as error:
        raise LocalCheckpointError(f"{local} could not be written: {error}") from None


def _make_folder(local: Path) -> None:
    """Create the local checkpoint's folder.  Raises `WeightRequestError` where that is impossible."""
    sync = local / SYNC_FOLDER
    try:
        local.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightRequestError(f"{local} cannot be a folder: {error.strerror}") from None
    if sync.is_symlink():
        raise WeightRequestError(f"{sync} must be a folder, but it is a symbolic link")
    found = {item.name for item in local.iterdir()}
    if found and SYNC_FOLDER not in found:
        raise WeightRequestError(f"{local} is neither empty nor made by a pull")
    sync.mkdir(exist_ok=True)


def _recover(local: Path) -> LocalState:
    """Finish or drop what a crash left, and return the state."""
    state = read_state(local)
    if state == LocalState(None) and any(item.name != SYNC_FOLDER for item in local.iterdir()):
        raise WeightRequestError(f"{local} is neither empty nor made by a pull")
    if state.applying is not None:
        state = _move_into_place(local, state)
    if _next(local).exists():
        shutil.rmtree(_next(local))
    return state


def _pull(
    local: Path, base: Path, source: Path, target: int, applied: LocalVersion | None, check: Check | None
) -> PullResult:
    deltas, full, start = chain_of(source, target, lambda version: _is_at(applied, version, source, base))
    from_local = full is None and _is_at(applied, start, source, base)
    previous = None if applied is None else applied.version
    if from_local and not deltas:
        return PullResult(target, previous, start, 0, 0, 0)
    origin = local if from_local else base if full is None else full.path
    names = _files_of(origin, None if full is None else source)
    if from_local:
        assert applied is not None
        names = list(applied.files)
    folder = open_checkpoint_folder(origin)
    if full is not None:
        (check or _like(base))(folder.metas)
    patched = patched_in(deltas)
    strangers = sorted(patched - homes_of(folder.files).keys())
    if strangers:
        raise ContentError(f"the deltas change tensors that {origin} does not have: {', '.join(strangers[:10])}")
    headers = {file.path.name: file for file in folder.files}
    changed = [
        name
        for name in names
        if not from_local or (name in headers and any(meta.name in patched for meta in headers[name].metas))
    ]
    identity = deltas[-1].identity if deltas else full.identity if full is not None else _base_identity(base)
    written = _write_next(local, folder, changed, deltas, patched)
    new = LocalVersion(target, tuple(names), identity, str(source.resolve()))
    state = LocalState(applied, new, tuple(changed))
    write_state(local, state)
    _move_into_place(local, state)
    _next(local).rmdir()
    return PullResult(target, previous, start if from_local else None, len(deltas), len(patched), written)


def patched_in(deltas: Sequence[VersionFolder]) -> set[str]:
    """Return the tensors that a chain of deltas changes.  Raises as `patched_names`."""
    return set().union(*map(patched_names, deltas))


def _is_at(applied: LocalVersion | None, version: int, source: Path, base: Path) -> bool:
    """Return whether the local checkpoint holds this version, and of this publication where that is known."""
    if applied is None or applied.version != version:
        return False
    if applied.identity is None:
        return True
    if version == 0:
        return applied.identity == _base_identity(base)
    if applied.source != str(source.resolve()):
        return False
    try:
        return read_version(source, version).identity == applied.identity
    except WeightRequestError:
        return True  # no longer published: the checksums of the deltas on top of it are compared


def _like(base: Path) -> Check:
    wanted = set(open_checkpoint_folder(base).metas)

    def check(metas: Sequence[TensorMeta]) -> None:
        odd = sorted(meta.name for meta in wanted ^ set(metas))
        if odd:
            raise ContentError(f"a full version differs from {base} in {', '.join(odd[:10])}")

    return check


def _base_identity(base: Path) -> str:
    return f"base:{base.resolve()}"


def _files_of(origin: Path, within: Path | None) -> list[str]:
    """Return the files of a checkpoint folder by name; others may lie next to them, and are left.

    Raises `ContentError` for a link that leads out of `within`.
    """
    names = sorted(item.name for item in origin.iterdir() if _is_checkpoint_file(item.name) and item.is_file())
    for name in names:
        if within is not None and not (origin / name).resolve().is_relative_to(within.resolve()):
            raise ContentError(f"{origin / name} points outside {within}")
    return names


def _is_checkpoint_file(name: str) -> bool:
    """Return whether the file holds weights, settings, or what tokenizers are made of."""
    return not name.startswith(".") and (Path(name).suffix in _SUFFIXES or name in _TEXT_FILES)


def _write_next(
    local: Path, origin: CheckpointFolder, names: Sequence[str], deltas: Sequence[VersionFolder], patched: set[str]
) -> int:
    """Write the files of the next version and flush them; returns their bytes.  On failure nothing is left of them."""
    folder = _next(local)
    folder.mkdir()
    headers = {file.path.name: file for file in origin.files}
    try:
        for name in names:
            if name in headers:
                _write_unpatched(folder / name, headers[name], patched)
            else:
                write_new(folder / name, _copy(origin.path / name))
        if _write_patched(folder, origin, deltas) != patched:
            raise ContentError("the published versions changed while they were read")
        origin.raw.require_unchanged()
        for name in names:
            flush(folder / name)
        sync_folder(folder)
        sync_folder(folder.parent)
        return sum((folder / name).stat().st_size for name in names)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_unpatched(target: Path, header: SafetensorsFile, patched: set[str]) -> None:
    """Write a safetensors file without its tensors that are patched."""
    with open_regular(header.path) as file:
        write_at(target, 0, [read_at(file, header.path, 0, header.content_start).numpy().data])
        for tensor in header.tensors:
            if tensor.meta.name not in patched:
                write_at(target, tensor.start, _chunks(file, header.path, tensor.start, tensor.meta.nbytes))


def _write_patched(folder: Path, origin: CheckpointFolder, deltas: Sequence[VersionFolder]) -> set[str]:
    """Write version by version, tensor by tensor: of a whole chain no more than one tensor is unpacked at a time.

    Returns the names of the tensors.
    """
    homes = {tensor.meta.name: (file, tensor) for file in origin.files for tensor in file.tensors}
    metas = {name: tensor.meta for name, (_, tensor) in homes.items()}
    written: set[str] = set()
    for version in deltas:
        for name, patch in read_patches(version, metas):
            header, tensor = homes[name]
            path = folder / header.path.name if name in written else header.path
            with open_regular(path) as file:
                content = patch.apply(read_tensor(file, path, tensor))
            write_at(folder / header.path.name, tensor.start, [tensor_bytes(content).numpy().data])
            written.add(name)
    return written


def _copy(path: Path) -> Iterator[bytes | memoryview]:
    with open_regular(path) as file:
        yield from _chunks(file, path, 0, os.fstat(file.fileno()).st_size)


def _chunks(file: BinaryIO, path: Path, start: int, nbytes: int) -> Iterator[bytes | memoryview]:
    for done in range(0, nbytes, _CHUNK_BYTES):
        yield read_at(file, path, start + done, min(_CHUNK_BYTES, nbytes - done)).numpy().data


def _move_into_place(local: Path, state: LocalState) -> LocalState:
    """Move from "applying" to applied; can be cut off and repeated at any point."""
    assert state.applying is not None
    for name in state.moving:
        if (_next(local) / name).exists():
            (_next(local) / name).replace(local / name)
        elif not (local / name).exists():
            raise TransactionStateError(f"{name} is missing in {local}; remove the folder and pull again")
    for name in set(state.applied.files if state.applied is not None else ()) - set(state.applying.files):
        (local / name).unlink(missing_ok=True)
    sync_folder(local)
    done = LocalState(state.applying)
    write_state(local, done)
    return done


def _next(local: Path) -> Path:
    return local / SYNC_FOLDER / NEXT_FOLDER

"""The file `.weight_sync/state.json` of a local checkpoint: the version that is there, and one being moved into place.

    state.json   version, identity, source_dir, files; `applying`: the same of the version that `next/` holds
    lock         held while the folder changes (exclusive) or is read (shared)
    next/        files of the next version; before `applying` is written they are scrap, afterwards they are durable

Written whole or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_sync.checkpoint_folder import is_plain_name
from weight_sync.delta.durable import replace_durably
from weight_sync.errors import ContentError, TransactionStateError
from weight_sync.safetensors_file import read_small, unique_keys

SYNC_FOLDER = ".weight_sync"
STATE_FILE = "state.json"
LOCK_FILE = "lock"
NEXT_FOLDER = "next"
_MAX_STATE_BYTES = 64 << 20


@dataclass(frozen=True)
class LocalVersion:
    """A version in a local checkpoint.

    `files`: all that belong to it, by name.  `identity`, `source`: of the publication; None where another program
    wrote the state.
    """

    version: int
    files: tuple[str, ...]
    identity: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class LocalState:
    """`moving`: the files that `next/` still held when `applying` was written."""

    applied: LocalVersion | None
    applying: LocalVersion | None = None
    moving: tuple[str, ...] = ()


def read_state(folder: Path) -> LocalState:
    """Return the state of a local checkpoint; empty where there is none.  Raises `ContentError` for a damaged one."""
    path = folder / SYNC_FOLDER / STATE_FILE
    if not path.exists():
        return LocalState(None)
    try:
        content = json.loads(read_small(path, _MAX_STATE_BYTES), object_pairs_hook=unique_keys)
        applied = _version(content, folder) if content.get("version") is not None else None
        applying = content.get("applying")
        if applying is None:
            return LocalState(applied)
        return LocalState(applied, _version(applying, folder), _names(applying["moving"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ContentError(f"{path} is damaged ({error!r}); remove the folder and pull again") from None


def write_state(folder: Path, state: LocalState) -> None:
    """Write the state file of a local checkpoint durably.  Raises `OSError`."""
    content: dict[str, Any] = {"version": None} if state.applied is None else _described(state.applied)
    if state.applying is not None:
        content["applying"] = _described(state.applying) | {"moving": list(state.moving)}
    replace_durably(folder / SYNC_FOLDER / STATE_FILE, json.dumps(content).encode())


def require_settled(folder: Path) -> LocalVersion | None:
    """Return the version that the folder holds.

    Raises `TransactionStateError` while a version is half in place, `ContentError` for a damaged state.
    """
    state = read_state(folder)
    if state.applying is not None:
        raise TransactionStateError(
            f"{folder} is between two versions, because a pull of version {state.applying.version} was interrupted. "
            "Pull again."
        )
    return state.applied


def _described(version: LocalVersion) -> dict[str, Any]:
    return {
        "version": f"{version.version:06d}",
        "identity": version.identity,
        "source_dir": version.source,
        "files": list(version.files),
    }


def _version(content: dict[str, Any], folder: Path) -> LocalVersion:
    files = content.get("files")
    if files is None:  # written by another program: everything there is the checkpoint
        files = sorted(item.name for item in folder.iterdir() if item.is_file())
    identity, source = content.get("identity"), content.get("source_dir")
    if not all(value is None or isinstance(value, str) for value in (identity, source)):
        raise ValueError("identity and source_dir must be text")
    return LocalVersion(int(content["version"]), _names(files), identity, source)


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) and is_plain_name(name) for name in names):
        raise ValueError("files must be named without a folder")
    return tuple(names)

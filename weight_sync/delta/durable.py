"""Files that are whole or not there: written under another name, flushed to the disk, renamed."""

from __future__ import annotations

import fcntl
import io
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weight_sync.errors import TransactionStateError

_POLL_S = 0.02


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to the disk; a file that was there is replaced.  Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "wb", buffering=0) as file:
        _write_all(file, chunks)
        os.fsync(descriptor)


def write_at(path: Path, start: int, chunks: Iterable[bytes | memoryview]) -> None:
    """Write into a file from byte `start` on, which is made where it is missing; `flush` it.  Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(descriptor, "wb", buffering=0) as file:
        file.seek(start)
        _write_all(file, chunks)


def flush(path: Path) -> None:
    """Flush what was written into a file to the disk.  Raises `OSError`."""
    _sync(path, os.O_RDONLY)


def replace_durably(path: Path, content: bytes) -> None:
    """Replace the file's content: it is the old or the new one at any time, and the new one after this.  Raises
    `OSError`.
    """
    temporary = path.with_name(path.name + ".tmp")
    write_new(temporary, [content])
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush renames and removals in a folder to the disk.  Raises `OSError`."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


@contextmanager
def locked(path: Path, *, shared: bool, timeout_s: float) -> Iterator[None]:
    """Hold the lock file `path`, which is made where it is missing, against other processes and threads.

    Raises `TransactionStateError` when another holds it for `timeout_s` seconds, `OSError`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TransactionStateError(
                        f"{path} has been locked by another process for more than {timeout_s:g} s"
                    ) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _write_all(file: io.FileIO, chunks: Iterable[bytes | memoryview]) -> None:
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            view = view[file.write(view) :]


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

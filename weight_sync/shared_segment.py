"""POSIX shared memory of another process, read like a file.

A segment is never mapped: a mapping of a segment that its owner shortens ends the reader with a signal, a read of it
only comes short.  Nothing is registered with a resource tracker, which would remove the segment when this process ends.

Two kinds of segment:

    SharedSegment       any name, as `multiprocessing.shared_memory` gives it; read-only
    torch_shared_file   what torch's `file_system` sharing makes: a 64-byte header, its first four bytes a count of
                        holders, then the content.  Its pickler counts the future reader in, so a reader that has done
                        must count itself out, or the segment outlives its owner's use.

Linux only: segments are the files of /dev/shm.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weight_sync.errors import ContentError, WeightRequestError

_FOLDER = "/dev/shm"
_NAME = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9_.\-]{0,199})")
_TORCH_NAME = re.compile(r"/torch_[0-9]+_[0-9]+_[0-9]+")
_TORCH_HEADER_BYTES = 64
_LOCK_TRIES = 1000
_COUNT = struct.Struct("<i")


@dataclass(frozen=True)
class SharedSegment:
    """`nbytes` bytes at `offset` of the segment `name`."""

    name: str
    nbytes: int
    offset: int = 0

    def check(self) -> None:
        """Raise `WeightRequestError` if the segment does not exist, or is too small."""
        with _opened(self.name) as descriptor:
            size = os.fstat(descriptor).st_size
        if size < self.offset + self.nbytes:
            raise WeightRequestError(
                f"shared memory {self.name!r} has {size} bytes, but the call needs {self.offset + self.nbytes}"
            )

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` with the content from byte `start` on.

        Raises `WeightRequestError` if the segment is gone, `ContentError` if it ends before.
        """
        done = 0
        with _opened(self.name) as descriptor:
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], self.offset + start + done)
                if count == 0:
                    raise ContentError(f"shared memory {self.name!r} ends at byte {self.offset + start + done}")
                done += count

    def unlink(self) -> None:
        """Remove the name; memory goes when its last user does.  A name that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            Path(_path(self.name)).unlink()


def torch_shared_file(handle: str, nbytes: int) -> SharedSegment:
    """Return the content of a storage that torch shared by file name.  Raises `WeightRequestError` for other names."""
    if not _TORCH_NAME.fullmatch(handle):
        raise WeightRequestError(f"{handle[:200]!r} is not a name of torch's shared memory")
    return SharedSegment(handle, nbytes, _TORCH_HEADER_BYTES)


def release_torch_shared_file(segment: SharedSegment) -> None:
    """Count one reader out, and remove the name with the last holder, as torch's own reader does.

    A segment that is gone, is not ours or has no plausible count is left as it is.  The count is read and written
    under a lock against other ranks that count themselves out; should its owner change it in between, it is off by
    one: the segment then lives as long as the owner's process, or loses its name early, which no holder notices.
    """
    with contextlib.suppress(WeightRequestError, OSError):
        with _opened(segment.name, os.O_RDWR) as descriptor:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or status.st_size != segment.offset + segment.nbytes:
                return
            _lock(descriptor)
            (count,) = _COUNT.unpack(os.pread(descriptor, _COUNT.size, 0))
            if count < 1:
                return
            os.pwrite(descriptor, _COUNT.pack(count - 1), 0)
        if count == 1:
            segment.unlink()


def _lock(descriptor: int) -> None:
    """Lock against other ranks; retry for about a second.  Raises `OSError`."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.001)
    raise BlockingIOError


def _path(name: str) -> str:
    match = _NAME.fullmatch(name)
    if match is None:
        raise WeightRequestError(f"{name[:200]!r} is not a name of shared memory")
    return f"{_FOLDER}/{match[1]}"


@contextlib.contextmanager
def _opened(name: str, mode: int = os.O_RDONLY) -> Iterator[int]:
    path = _path(name)
    try:
        descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise WeightRequestError(f"cannot open shared memory {name!r}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WeightRequestError(f"{name!r} is not shared memory")
        yield descriptor
    finally:
        os.close(descriptor)

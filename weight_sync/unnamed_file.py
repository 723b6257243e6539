"""`UnnamedFile`: bytes saved in a temporary file that disappears when it is closed, checked when they are read."""

from __future__ import annotations

import tempfile
import zlib
from typing import NamedTuple

_CALL_BYTES = 64 << 20  # written or read in one call


class Entry(NamedTuple):
    """The position of some bytes in the file; `checksum` is their CRC-32."""

    start: int
    num_bytes: int
    checksum: int


class UnnamedFile:
    """`directory`: None for the system's temporary directory ($TMPDIR).  Raises `OSError`, as all methods do."""

    def __init__(self, prefix: str, directory: str | None = None) -> None:
        self.num_bytes = 0
        self._file = tempfile.TemporaryFile(prefix=prefix, dir=directory, buffering=0)  # noqa: SIM115

    def append(self, content: memoryview) -> Entry:
        checksum, left = 0, content
        self._file.seek(self.num_bytes)
        while left:
            count = self._file.write(left[:_CALL_BYTES])
            checksum, left = zlib.crc32(left[:count], checksum), left[count:]
        entry = Entry(self.num_bytes, len(content), checksum)
        self.num_bytes += len(content)
        return entry

    def read(self, entry: Entry, target: memoryview) -> None:
        """Fill `target`, of the entry's size.  Raises `OSError` also if the bytes are not as `append` wrote them."""
        checksum, left = 0, target
        self._file.seek(entry.start)
        while left:
            count = self._file.readinto(left[:_CALL_BYTES])
            if not count:
                raise OSError(f"it is damaged: the last {len(left)} bytes are missing")
            checksum, left = zlib.crc32(left[:count], checksum), left[count:]
        if checksum != entry.checksum:
            raise OSError("it is damaged: its checksum differs")

    def close(self) -> None:
        self._file.close()

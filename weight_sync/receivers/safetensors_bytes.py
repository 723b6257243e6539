"""Receives tensors as one safetensors file in memory: the bytes in the call itself, or in shared memory by name.

The form without pickle.  A bucket is a view of the call's bytes, or read once from shared memory.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from weight_sync.errors import WeightRequestError
from weight_sync.receivers.base import KnownCall, Receiver, StoredSource, stored_call
from weight_sync.safetensors_file import header_text, parse_text
from weight_sync.shared_segment import SharedSegment
from weight_sync.stored_tensors import (
    InlineStorage,
    SegmentStorage,
    Storage,
    contiguous_place,
    name_tensor,
)

MAX_HEADER_BYTES = 16 << 20
UNLINK_PREFIX = "lockstep_"
"""The beginning of names that a call may have removed.  Other shared memory of this machine is left alone."""


class SafetensorsSource(StoredSource):
    """One call's tensors: `content` is the file, or the segment that holds it.

    A segment is read and left alone; with `unlink` its name, which must begin with `UNLINK_PREFIX`, is removed once it
    is read, or refused after it was found to be a safetensors file.
    """

    def __init__(self, content: bytearray | SharedSegment, receiver: Receiver, *, unlink: bool = False) -> None:
        super().__init__(receiver)
        self._content = content
        self._unlink = unlink
        self._release: Callable[[], object] = _nothing

    def refuse(self, reason: str) -> None:
        """Remove the segment's name after the call failed, if that was asked for."""
        if self._unlink and self._release is _nothing:
            with suppress(WeightRequestError):
                self._read()
        super().refuse(reason)

    def _read(self) -> tuple[KnownCall, Sequence[Storage]]:
        storage = self._storage()
        text = header_text(
            "safetensors", storage.nbytes, lambda start, n: storage.read(start, start + n), MAX_HEADER_BYTES
        )

        def read() -> KnownCall:
            tensors = []
            for found in parse_text("safetensors", storage.nbytes, text).tensors:
                place = contiguous_place(storage, found.meta.dtype, found.meta.shape, found.start)
                tensors.append(name_tensor(found.meta.name, place))
            return stored_call(tensors, self._known_calls)

        key = ("safetensors", type(storage), storage.nbytes, hashlib.sha256(text).digest())
        call = self._known_calls.get(key, read)
        if self._unlink and isinstance(self._content, SharedSegment):
            self._release = weakref.finalize(self, self._content.unlink)
        return call, [storage]

    def _storage(self) -> Storage:
        if not isinstance(self._content, SharedSegment):
            return InlineStorage(memoryview(self._content))
        name = self._content.name
        if self._unlink and not name.removeprefix("/").startswith(UNLINK_PREFIX):
            raise WeightRequestError(f"shm_unlink needs a name that begins with {UNLINK_PREFIX!r}, got {name[:200]!r}")
        self._content.check()
        return SegmentStorage(self._content)


def _nothing() -> None:
    """Release nothing: nothing is held."""

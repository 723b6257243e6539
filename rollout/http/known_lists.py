"""The record of lists of tensors that this server has read: lists that come again are passed on.

A list is known by its bytes alone: JSON that differs in anything, be it a space, is read anew.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import msgspec

from rollout.core.messages.tensor_lists import StrictBoxes, StrictSize, digest_of, joined_lists, pieces_of

MAX_KNOWN = 16384
"""Calls of one refresh.  A trainer with more of them sends short lists, which are soon read."""
_KINDS: tuple[Any, ...] = (list[str], list[str], list[list[StrictSize]], StrictBoxes)
_NONE = msgspec.Raw(b"null")


class RawLists(NamedTuple):
    """Lists that were found valid: their JSON object, its digest, and the number of names."""

    data: bytes
    digest: bytes
    num_names: int


class KnownLists:
    """Remembers the digests of the valid lists that came last.  One for a server; any thread may use it."""

    def __init__(self, limit: int = MAX_KNOWN) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._num_names: dict[bytes, int] = {}  # by digest, oldest first

    def __len__(self) -> int:
        return len(self._num_names)

    def read(
        self, names: msgspec.Raw, dtypes: msgspec.Raw, shapes: msgspec.Raw, boxes: msgspec.Raw = _NONE
    ) -> RawLists:
        """Return the lists.  Raises `msgspec.DecodeError` or `UnicodeDecodeError` unless they are valid as they are."""
        raw = (names, dtypes, shapes) if bytes(boxes) == b"null" else (names, dtypes, shapes, boxes)
        data = joined_lists(*raw)
        digest = digest_of(data)
        with self._lock:
            count = self._num_names.pop(digest, None)
        if count is None:
            count, *_ = [sum(map(len, pieces_of(part, kind))) for part, kind in zip(raw, _KINDS)]
        with self._lock:
            self._num_names[digest] = count
            while len(self._num_names) > self._limit:
                del self._num_names[next(iter(self._num_names))]
        return RawLists(data, digest, count)

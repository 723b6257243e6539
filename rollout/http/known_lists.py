"""The record of lists of tensors that this server has read: lists that come again are passed on.

A list is known by its bytes alone: JSON that differs in anything, be it a space, is read anew.

Lists that stand in a body as `joined_lists` would write them are found without reading them: `KnownLists.cut` compares
their bytes, and puts stand-ins in their place that are made by chance for each body.  If the rest of the body, once
read, has the stand-ins where lists belong, the lists were there.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any, NamedTuple

import msgspec

from rollout.core.messages.tensor_lists import StrictBoxes, StrictSize, digest_of, joined_lists, pieces_of

MAX_KNOWN = 16384
"""Calls of one refresh.  A trainer with more of them sends short lists, which are soon read."""
MAX_KEPT_BYTES = 64 << 20
"""JSON that is kept, each list's with the braces around it and without: a refresh of 100,000 tensors has 10 MB."""
_BEGINNING = b'"names":["'
_KEY_BYTES = 512
"""Bytes of the beginning by which kept JSON is found."""
ALIKE = 4
"""The number of lists with the same beginning that are kept.  A manifest begins as its first bucket does."""
_KINDS: tuple[Any, ...] = (list[str], list[str], list[list[StrictSize]], StrictBoxes)
_NONE = msgspec.Raw(b"null")


class RawLists(NamedTuple):
    """Lists that were found valid: their JSON object, its digest, and the number of names."""

    data: bytes
    digest: bytes
    num_names: int


class NotThere(Exception):
    """Known lists are somewhere in a body, but not where lists belong."""


class _Kept(NamedTuple):
    """Lists, and their JSON without the braces, which a slice would copy for each comparison."""

    lists: RawLists
    inside: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.lists.data) + len(self.inside)


class CutBody:
    """A body in which stand-ins take the place of known `lists`, from `start` to `end`."""

    def __init__(self, data: bytes, start: int, end: int, lists: RawLists) -> None:
        mark = b'["%b"]' % secrets.token_hex(16).encode()
        self._lists = lists
        self._mark = mark
        self.data = b"".join((data[:start], joined_lists(mark, mark, mark)[1:-1], data[end:]))

    def read(
        self, names: msgspec.Raw, dtypes: msgspec.Raw, shapes: msgspec.Raw, boxes: msgspec.Raw = _NONE
    ) -> RawLists:
        """Return the lists.  Raises `NotThere` unless exactly the stand-ins are in their place."""
        if {bytes(names), bytes(dtypes), bytes(shapes)} != {self._mark} or bytes(boxes) != b"null":
            raise NotThere
        return self._lists


class KnownLists:
    """Remembers the valid lists that came last: their digests, and as many of them as `max_bytes` hold.

    One for a server; any thread may use it.
    """

    def __init__(self, limit: int = MAX_KNOWN, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_names: dict[bytes, int] = {}  # by digest, oldest first
        self._kept: dict[bytes, dict[bytes, _Kept]] = {}  # by beginning and digest; in both what came last is last
        self._num_bytes = 0

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
        lists = RawLists(data, digest, count)
        if len(raw) == len((names, dtypes, shapes)):
            self._keep(lists)
        return lists

    def cut(self, data: bytes) -> CutBody | None:
        """Return the body with stand-ins for the first lists in it, if exactly these are kept."""
        start = data.find(_BEGINNING)
        key = data[start : start + _KEY_BYTES]
        with self._lock:
            found = tuple(self._kept.get(key, {}).values()) if start >= 0 else ()
        for kept in found:
            if data.startswith(kept.inside, start):
                self._renew(key, kept)
                return CutBody(data, start, start + len(kept.inside), kept.lists)
        return None

    def _renew(self, key: bytes, kept: _Kept) -> None:
        """Note that kept lists came again.  Another thread may have removed them meanwhile."""
        digest = kept.lists.digest
        with self._lock:
            if digest in self._kept.get(key, {}):
                alike = self._kept[key] = self._kept.pop(key)
                alike[digest] = alike.pop(digest)

    def _keep(self, lists: RawLists) -> None:
        kept = _Kept(lists, lists.data[1:-1])
        if len(kept.inside) < _KEY_BYTES or kept.num_bytes > self._max_bytes:
            return
        key = kept.inside[:_KEY_BYTES]
        with self._lock:
            alike = self._kept[key] = self._kept.pop(key, {})
            if lists.digest in alike:
                self._num_bytes -= alike.pop(lists.digest).num_bytes
            alike[lists.digest] = kept
            self._num_bytes += kept.num_bytes
            if len(alike) > ALIKE:
                self._remove_oldest(key)
            while self._num_bytes > self._max_bytes:
                self._remove_oldest(next(iter(self._kept)))

    def _remove_oldest(self, key: bytes) -> None:
        """Remove the oldest of the lists with this beginning.  Call it under the lock."""
        alike = self._kept[key]
        self._num_bytes -= alike.pop(next(iter(alike))).num_bytes
        if not alike:
            del self._kept[key]

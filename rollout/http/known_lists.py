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
"""JSON that is kept to be compared: a refresh of 100,000 tensors has 10 MB."""
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


def _inside(lists: RawLists) -> bytes:
    """Return the JSON of the lists without the braces around it."""
    return lists.data[1:-1]


class CutBody:
    """A body in which stand-ins take the place of known `lists`."""

    def __init__(self, data: bytes, start: int, lists: RawLists) -> None:
        mark = b'["%b"]' % secrets.token_hex(16).encode()
        self._lists = lists
        self._mark = mark
        end = start + len(_inside(lists))
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
        self._kept: dict[bytes, list[RawLists]] = {}  # by their beginning, oldest first, and so the lists of each
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
            alike = self._kept.pop(key, None) if start >= 0 else None
            if alike is not None:
                self._kept[key] = alike  # the one that came last
            found = tuple(alike or ())
        for lists in found:
            if data.startswith(_inside(lists), start):
                return CutBody(data, start, lists)
        return None

    def _keep(self, lists: RawLists) -> None:
        key = lists.data[1 : 1 + _KEY_BYTES]
        if not _KEY_BYTES <= len(_inside(lists)) <= self._max_bytes:
            return
        with self._lock:
            alike = self._kept.pop(key, [])
            others = [other for other in alike if other.digest != lists.digest][1 - ALIKE :]
            self._kept[key] = [*others, lists]
            self._num_bytes += _num_bytes(self._kept[key]) - _num_bytes(alike)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _num_bytes(self._kept.pop(next(iter(self._kept))))


def _num_bytes(alike: list[RawLists]) -> int:
    return sum(len(lists.data) for lists in alike)

"""Requests on the short way: `ShortCycle`, one of them on its connection, and `ShortWay`, what a server's share.

Clients send the same head again and again; only the length of the body differs.  So a head is read, and checked, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rollout.http.native.short_generate import OnPassed, ShortGenerate
from rollout.server.heads import HEAD_LINES, Headers, read_head

MAX_SHORT_BYTES = 64 * 1024
"""Limit of a body: longer ones are read off the event loop."""
MAX_HEADS = 1024
MAX_KNOWN_HEAD_BYTES = 2048
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,15})(?=\r\n|\Z)", re.IGNORECASE)


class ShortWay:
    """The part of the short way that all connections of a server share."""

    def __init__(self, generate: ShortGenerate) -> None:
        self.generate = generate
        self._heads: dict[bytes, bool] = {}  # without the length: whether the answer is msgpack
        self._lines_of: Headers = []
        self._lines = b""

    def known(self, head: bytes) -> tuple[int, bool] | None:
        """Return the length of the body, and whether the answer is msgpack; None for a request of the long way."""
        length = _LENGTH.search(head)
        if length is None or len(head) > MAX_KNOWN_HEAD_BYTES or int(length[1]) > MAX_SHORT_BYTES:
            return None
        others = head[: length.start()] + head[length.end() :]
        is_binary = self._heads.get(others)
        if is_binary is None:
            found = read_head(head)
            is_binary = None if found is None else self.generate.admits(*found[:3])
            if is_binary is None:
                return None
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            self._heads[others] = is_binary
        return int(length[1]), is_binary

    def lines(self, headers: Headers) -> bytes:
        """Return the lines of uvicorn's headers, which it makes anew each second."""
        if headers is not self._lines_of:
            self._lines_of, self._lines = headers, b"".join([b"%b: %b\r\n" % header for header in headers])
        return self._lines


class _NoEvent:
    def set(self) -> None:
        """Do nothing: no task waits."""


_NO_EVENT = _NoEvent()


class ShortCycle:
    """A request on the short way, in the place of uvicorn's cycle; a `Reply` of `ShortGenerate`.

    `head`: its bytes, from which the long way begins.
    """

    def __init__(self, protocol: Any, way: ShortWay, head: bytes, is_binary: bool) -> None:
        self.head = head
        self.is_binary = is_binary
        self.body = bytearray()
        self.more_body = True
        self.disconnected = False
        self.keep_alive = True
        self.response_complete = False
        self.message_event = _NO_EVENT
        self.on_disconnect: Callable[[], None] | None = None
        self._protocol = protocol
        self._way = way

    def begin(self) -> None:
        """Begin to work: the body is whole."""
        self._way.generate.begin(self)

    def note_disconnect(self) -> None:
        """Tell who works on it."""
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None and not self.response_complete:
            on_disconnect()

    def take_long_way(self, on_passed: OnPassed | None) -> None:
        self._protocol.take_long_way(self, on_passed)

    def answer(self, status: int, headers: bytes, body: bytes) -> None:
        """Write the answer; `headers` are whole lines but `content-length`."""
        if self.disconnected:
            return
        protocol = self._protocol
        lines = self._way.lines(protocol.server_state.default_headers)
        size = b"content-length: %d\r\n\r\n" % len(body)
        protocol.transport.write(b"".join((HEAD_LINES[status], lines, headers, size, body)))
        self.response_complete = True
        if not self.keep_alive:
            protocol.transport.close()
        protocol.on_response_complete()

"""Server-sent events out of a byte stream.

Works on bytes because text that a model produced may contain characters which line
iterators over `str` take for ends of lines.
"""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"


class SseDecoder:
    """Feed it chunks as they come; it yields the data of each complete event."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # parts of a line that has not ended
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of every event that `chunk` completes.  Comments and other fields are ignored."""
        first, *others = chunk.split(b"\n")
        self._line.append(first)
        for part in others:
            line = b"".join(self._line).removesuffix(b"\r")
            self._line = [part]
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event

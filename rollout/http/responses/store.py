"""Responses that later ones go on from, by id, in the memory of the HTTP process."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rollout.core.errors import NotFound
from rollout.http.responses.items import Message

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The whole conversation up to a response, as messages without instructions, and the response as JSON.

    `num_bytes`: the size of both.  Conversations share the messages of their turns, so that it counts too much.
    """

    messages: list[Message]
    content: bytes
    num_bytes: int


class ResponseStore:
    """Keeps the responses that were used last, up to `MAX_RESPONSES` and `MAX_BYTES`."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep a response, and drop the least recently used ones that have no room."""
        self._drop(response_id)
        self._responses[response_id] = response
        self._num_bytes += response.num_bytes
        while self._responses and (len(self._responses) > MAX_RESPONSES or self._num_bytes > MAX_BYTES):
            self._drop(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse:
        """Return a response.  Raises `NotFound`."""
        if response_id not in self._responses:
            raise NotFound(f"no response {response_id[:80]!r} is kept: it was not stored, or is too long ago")
        self._responses.move_to_end(response_id)
        return self._responses[response_id]

    def delete(self, response_id: str) -> None:
        """Drop a response.  Raises `NotFound`."""
        self.get(response_id)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        dropped = self._responses.pop(response_id, None)
        if dropped is not None:
            self._num_bytes -= dropped.num_bytes

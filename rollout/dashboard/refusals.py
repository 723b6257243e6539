"""`RefusalLog`: the last requests that got an error, and why.  The gate before the routes reports them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from rollout.http.io import CLIENT_CLOSED_REQUEST

KEPT = 30
MAX_PATH_CHARS = 120
MAX_REASON_CHARS = 400
_MAX_BODY_BYTES = 16_384
PROBES = frozenset({"/health", "/health_generate", "/ready", "/liveness", "/ping"})
"""Paths whose 503 is an answer: not ready yet, paused, or draining.  Probes ask again and again."""


@dataclass(slots=True)
class Refusal:
    """A refused call.  `at`: its last refusal, in seconds since 1970; `times`: how often in a row it was refused."""

    method: str
    path: str
    status: int
    reason: str
    times: int = field(default=1, compare=False)
    at: float = field(default_factory=time.time, compare=False)


class RefusalLog:
    """The last refused calls.  A refusal that is repeated right away is counted, and not added again."""

    def __init__(self) -> None:
        self._entries: deque[Refusal] = deque(maxlen=KEPT)

    def note_answer(self, method: str, path: str, status: int, body: bytes) -> None:
        """Note an answer from status 400 on.  A 503 to a probe and a client that went away are left out."""
        if status != CLIENT_CLOSED_REQUEST and not (status == 503 and path in PROBES):
            self.note(method, path, status, reason_in(body))

    def note(self, method: str, path: str, status: int, reason: str) -> None:
        new = Refusal(method[:16], _cut(path, MAX_PATH_CHARS), status, _cut(reason, MAX_REASON_CHARS))
        last = self._entries[-1] if self._entries else None
        if last is not None and last == new:
            last.times, last.at = last.times + 1, new.at
        else:
            self._entries.append(new)

    def entries(self) -> list[dict[str, Any]]:
        """Return the refused calls, oldest first."""
        return [asdict(entry) for entry in self._entries]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def reason_in(body: bytes) -> str:
    """Return the message in the body of an error, or an empty text where it has none."""
    if len(body) > _MAX_BODY_BYTES:
        return ""
    try:
        content = msgspec.json.decode(body)
        return str(content["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""

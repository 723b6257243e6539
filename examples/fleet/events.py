"""The events of a run: kept in order, shown, and written to a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STARTED = "process started"
AT_VERSION = "at the current version"
REGISTERED = "registered with the router"
FIRST_SAMPLE = "first sample answered"
COMMITTED = "new weights committed"
KILLED = "killed (SIGKILL)"
NOTICED = "end noticed"
FAILED = "did not come up"


@dataclass(frozen=True)
class Event:
    """`seconds` since the fleet began; `engine`: its name, or several with commas; `version`: of its weights then.

    `why`: the reason, where the event alone does not give it.
    """

    seconds: float
    what: str
    engine: str
    version: int | None = None
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what


class EventLog:
    """The events of a run.  `heard` is called with every new one."""

    def __init__(self, heard: Callable[[Event], None]) -> None:
        self._start = time.monotonic()
        self._heard = heard
        self.events: list[Event] = []

    @property
    def seconds(self) -> float:
        """The seconds since the fleet began."""
        return time.monotonic() - self._start

    def add(self, what: str, engine: str, version: int | None = None, why: str = "") -> None:
        event = Event(round(self.seconds, 3), what, engine, version, why)
        self.events.append(event)
        self._heard(event)


def write_events(path: Path, events: Sequence[Event], facts: dict[str, Any]) -> None:
    """Write JSON: `events`, and `facts` next to them."""
    path.write_text(json.dumps({"events": [asdict(event) for event in events], **facts}, indent=1) + "\n")

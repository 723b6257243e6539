"""One engine of a fleet, and which engine a request goes to."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rollout.client.async_client import AsyncRolloutClient
from rollout.client.errors import ServerUnreachable
from rollout.client.wire import Call

T = TypeVar("T")
_MAX_SESSIONS = 1 << 16


@dataclass(eq=False)
class FleetEngine:
    """`left_out` states why it is not in use; None: it is."""

    client: AsyncRolloutClient
    left_out: str | None = "not checked yet"
    weight_version: str | None = None  # by its last report
    outstanding: int = 0  # calls on their way
    start_id: str | None = None  # of its process; None: it does not report one
    num_failures: int = 0  # checks in a row
    num_differences: int = 0  # checks in a row with another weight version than the others
    is_paused: bool = False  # a pause of ours that could not be ended
    turn: int = 0  # when it was last chosen
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return self.client.base_url

    def leave_out(self, why: str) -> None:
        """Leave the engine out from now on; calls on their way end with `ServerUnreachable`."""
        self.left_out = why
        self._gone.set()

    def take_back(self) -> None:
        self.left_out = None
        self.num_failures = self.num_differences = 0
        self._gone.clear()

    async def exchange(self, call: Call[T]) -> T:
        """Make a call.  Raises what the client raises, and `ServerUnreachable` once the engine is left out."""
        self.outstanding += 1
        answer = asyncio.ensure_future(self.client._exchange(call))
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ServerUnreachable(f"the engine at {self.url} was left out: {self.left_out}")
        finally:
            self.outstanding -= 1
            for task in (answer, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(answer, gone, return_exceptions=True)


class Choice:
    """The engine with the fewest calls on their way; a session stays where it is as long as that engine is in use."""

    def __init__(self, engines: Sequence[FleetEngine]) -> None:
        self._engines = engines
        self._sessions: OrderedDict[str, FleetEngine] = OrderedDict()  # sessions; the most recently used is last
        self._turns = 0

    def choose(self, session_id: str | None, tried: Collection[FleetEngine]) -> FleetEngine | None:
        """Choose an engine in use that is not among `tried`; None if there is none."""
        pinned = self._sessions.get(session_id) if session_id is not None else None
        if pinned is not None and pinned.left_out is None:
            chosen = pinned if pinned not in tried else None
        else:
            free = [engine for engine in self._engines if engine.left_out is None and engine not in tried]
            chosen = min(free, key=lambda engine: (engine.outstanding, engine.turn), default=None)
        if chosen is not None:
            self._turns += 1
            chosen.turn = self._turns
            if session_id is not None:
                self._sessions[session_id] = chosen
                self._sessions.move_to_end(session_id)
                if len(self._sessions) > _MAX_SESSIONS:
                    self._sessions.popitem(last=False)
        return chosen

    def forget(self, engine: FleetEngine) -> None:
        """Forget the engine's sessions: their next requests go to other engines."""
        for session_id in [each for each, pinned in self._sessions.items() if pinned is engine]:
            del self._sessions[session_id]

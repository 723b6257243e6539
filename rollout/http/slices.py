"""`Slices`: work that the event loop does in parts, so that others get their turn in between."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SLICE_S = 0.002
"""Seconds of work in one pass of the event loop, and what the last piece takes beyond."""


class Slices:
    """Pieces of work of a fraction of a millisecond, first come, first served.  Use from one event loop.

    A thousand requests that come at once, or whose answers do, would otherwise all be worked on before anything else:
    health, control and the requests of others.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def add(self, work: Callable[[], None]) -> None:
        """Have `work` called in this pass or a later one, after what waits already.

        The event loop logs an error that it raises.  The other pieces still get their turn.
        """
        self._waiting.append(work)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        until = time.monotonic() + SLICE_S
        try:
            while self._waiting:
                self._waiting.popleft()()
                if time.monotonic() > until:
                    break
        finally:
            self._is_due = bool(self._waiting)
            if self._is_due:
                asyncio.get_running_loop().call_soon(self._work)

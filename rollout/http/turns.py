"""`Turns`: how many requests begin in one pass of the event loop.

A thousand requests that come at once would otherwise all be parsed before anything else gets its turn: health, control
and the answers of others.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 8


class Turns:
    """First come, first served.  Use from one event loop."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._is_due = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Go on in this pass, or in a later one if `AT_ONCE` others did."""
        if self._waiting or not self._left:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
            return
        self._left -= 1
        self._see_to_next_pass()

    def _see_to_next_pass(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._is_due = False
        self._left = AT_ONCE
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            self._see_to_next_pass()

"""`Patience`: how long to wait for a sender that may be gone; somebody else may end a wait before its deadline.

Knows waits and reasons.  Does not know what is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weight_sync.errors import TransportError

POLL_S = 0.1


class Patience:
    """Of one engine.  `give_up` may be called on any thread; who waits learns of it within `POLL_S`."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def renew(self) -> None:
        """Another call begins; none waits."""
        self._reason = None

    def give_up(self, reason: str) -> None:
        """End the waits of this call.  The first reason counts."""
        self._reason = self._reason or reason

    def check(self) -> None:
        """Raises `TransportError` once it was given up."""
        if self._reason is not None:
            raise TransportError(f"the wait for the sender was given up: {self._reason}")

    def wait(self, is_over: Callable[[float], bool], deadline: float) -> bool:
        """Ask `is_over(seconds)`, which waits so long itself, until it says yes or the deadline (`time.monotonic()`).

        Whether it said yes.  Raises what it raises, and as `check`.
        """
        while True:
            self.check()
            left_s = deadline - time.monotonic()
            if is_over(max(min(left_s, POLL_S), 0.001)):
                return True
            if left_s <= POLL_S:
                return False

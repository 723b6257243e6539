"""Waits with an end: `Patience`, which can be cancelled, `Lease`, which expires, and calls in threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from weight_sync.errors import TransportError, WeightRequestError

DEFAULT_LEASE_S = 600.0
POLL_S = 0.1


class Patience:
    """Cancels the waits of one engine.  `give_up` may be called on any thread; a wait ends within `POLL_S` of it."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def renew(self) -> None:
        """Begin another call; no wait is running."""
        self._reason = None

    def give_up(self, reason: str) -> None:
        """Cancel the waits of this call.  The first reason counts."""
        self._reason = self._reason or reason

    @property
    def has_ended(self) -> bool:
        """True once the waits of this call were cancelled."""
        return self._reason is not None

    def check(self) -> None:
        """Raise `TransportError` once the wait was cancelled."""
        if self._reason is not None:
            raise TransportError(f"the wait for the sender ended early: {self._reason}")

    def wait(self, is_over: Callable[[float], bool], deadline: float) -> bool:
        """Call `is_over(seconds)`, which itself waits that long, until it is true or the deadline (`time.monotonic()`).

        Returns whether it became true.  Raises what it raises, and as `check`.
        """
        while True:
            self.check()
            left_s = deadline - time.monotonic()
            if is_over(max(min(left_s, POLL_S), 0.001)):
                return True
            if left_s <= POLL_S:
                return False


class Lease:
    """Runs out `seconds` after the last `renew`; `math.inf` never does.  `clock` is monotonic, in seconds.

    Raises `WeightRequestError` unless `seconds` is positive.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds > 0:
            raise WeightRequestError(f"a lease must be longer than 0 s, got {seconds}")
        self.seconds = seconds
        self._clock = clock
        self.deadline = math.inf  # by its clock
        self.renew()

    def __str__(self) -> str:
        return f"{self.left_s:.0f} s left of its lease" if math.isfinite(self.seconds) else "without a lease"

    def renew(self, seen_at: float | None = None) -> None:
        """Start anew.  `seen_at`, by its clock: when its holder was seen; nothing changes if it had run out by then."""
        if seen_at is None or seen_at < self.deadline:
            self.deadline = self._clock() + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.deadline - self._clock())

    @property
    def expired(self) -> bool:
        return self.left_s == 0.0


def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run in a daemon thread: a call that hangs can neither hold up the next one nor the end of the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-call", daemon=True).start()
    return future

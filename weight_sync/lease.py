"""`Lease`: how long something may wait for its owner's next sign of life.

Knows a clock.  Does not know what is dropped when it runs out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from weight_sync.errors import WeightRequestError

DEFAULT_LEASE_S = 600.0


class Lease:
    """Runs out `seconds` after the last `renew`; `math.inf` never does.  `clock` is monotonic, in seconds.

    Raises `WeightRequestError` unless `seconds` is positive.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds > 0:
            raise WeightRequestError(f"a lease must be longer than 0 s, got {seconds}")
        self.seconds = seconds
        self._clock = clock
        self._deadline = math.inf
        self.renew()

    def __str__(self) -> str:
        return f"{self.left_s:.0f} s left of its lease"

    def renew(self) -> None:
        self._deadline = self._clock() + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._deadline - self._clock())

    @property
    def expired(self) -> bool:
        return self.left_s == 0.0

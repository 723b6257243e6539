"""`HiddenMemory`: the hidden states of all requests together, within one limit.

A request counts with the most that its rows may take.  It counts from the moment in which it is admitted until nothing
holds its `HiddenHold`: while it runs, while its answer waits for its client, and while its stream is kept.
"""

from __future__ import annotations

import math
import weakref
from collections import deque

from rollout.core.errors import Unavailable


class HiddenHold:
    """The place of one request's hidden states.  It is given back when the last reference to it goes."""


class HiddenMemory:
    """Counts the bytes of hidden states that requests may come to hold.  Use from one event loop.

    A hold may end on any thread, also within a collection of garbage.  So it only leaves a note, which the next look
    at the sum takes in.
    """

    def __init__(self, limit_bytes: int = 2048 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._ended: deque[int] = deque()  # bytes of holds that have ended

    @property
    def num_bytes(self) -> int:
        """The bytes of all holds."""
        while self._ended:
            self._num_bytes -= self._ended.popleft()
        return self._num_bytes

    def hold(self, num_bytes: int) -> HiddenHold:
        """Return a hold of `num_bytes`.  Raises `Unavailable`, holding nothing, where they are over the limit.

        A request that is within the limit of one request is never refused while no other is held.
        """
        limit = self._limit_bytes
        free = limit - self.num_bytes
        if num_bytes > free:
            raise Unavailable(
                f"hidden states of the request need {math.ceil(num_bytes / 2**20)} MB, and {free >> 20} of "
                f"{limit >> 20} MB are free. Send it again once others are answered, or ask for fewer tokens, layers "
                "or samples. The server's flag is --max-request-mb."
            )
        self._num_bytes += num_bytes
        hold = HiddenHold()
        weakref.finalize(hold, self._ended.append, num_bytes).atexit = False
        return hold

"""`SessionPins`: prefixes that sessions will use again, kept from eviction for a while.

A session's prefixes are pinned where its last requests ended, for `keep_s` seconds; a longer prefix replaces the ones
that it continues.  Over the bound in tokens, the least recently used session is dropped.  Prefixes of older weights
cannot be matched any more, so they are never kept.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import RadixNode

MAX_BRANCHES = 8
"""Prefixes of one session: subagents and the samples of a group continue it differently."""


@dataclass(slots=True)
class _Pin:
    expires_at: float
    nodes: list[RadixNode] = field(default_factory=list)


class SessionPins:
    """`max_tokens`: tokens of all pinned prefixes together, each counted once; 0 pins nothing.  `clock` is monotonic.

    `on_first()` is called when the first pin is set after there was none.
    """

    def __init__(
        self, cache: RadixCache, max_tokens: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.on_first: Callable[[], None] = lambda: None
        self._cache = cache
        self._max_tokens = max_tokens
        self._keep_s = keep_s
        self._clock = clock
        self._pins: OrderedDict[str, _Pin] = OrderedDict()  # the least recently used session first

    def keep(self, session_id: str, node: RadixNode) -> None:
        """Pin the prefix that ends at `node`, of the current weights."""
        path = self._cache.path(node)
        if not 0 < sum(map(len, path)) <= self._max_tokens:
            return
        if not self._pins:
            self.on_first()
        pin = self._pins.setdefault(session_id, _Pin(0.0))
        pin.expires_at = self._clock() + self._keep_s
        self._pins.move_to_end(session_id)
        self._cache.pin(node)
        superseded = [old for old in pin.nodes if old in path]
        pin.nodes = [old for old in pin.nodes if old not in path] + [node]
        for old in superseded + pin.nodes[:-MAX_BRANCHES]:
            self._cache.unpin(old)
        pin.nodes = pin.nodes[-MAX_BRANCHES:]
        while self._cache.num_pinned > self._max_tokens:
            if len(pin.nodes) > 1 and len(self._pins) == 1:
                self._cache.unpin(pin.nodes.pop(0))
            else:
                self.drop_oldest()

    def expire(self) -> float:
        """Drop what has expired; return when the next pin does, by the clock."""
        now = self._clock()
        while self._pins:
            expires_at = next(iter(self._pins.values())).expires_at
            if expires_at > now:
                return expires_at
            self.drop_oldest()
        return math.inf

    def retire(self) -> None:
        """Drop everything, as other weights were published."""
        self.clear()
        self._cache.drop_retired()

    def drop_oldest(self) -> bool:
        """Drop the least recently used session.  Returns False if there is none."""
        return bool(self._pins) and self.drop(next(iter(self._pins)))

    def drop(self, session_id: str) -> bool:
        """Drop the pins of a session.  Returns False if it has none."""
        pin = self._pins.pop(session_id, None)
        for node in pin.nodes if pin is not None else ():
            self._cache.unpin(node)
        return pin is not None

    def clear(self) -> None:
        while self.drop_oldest():
            pass

    def nodes(self) -> dict[str, list[RadixNode]]:
        """Return the nodes at which each session is pinned."""
        return {session_id: list(pin.nodes) for session_id, pin in self._pins.items()}

    def expires_in(self, session_id: str) -> float | None:
        """Return the seconds until the session's pins expire; None if it has no pin."""
        pin = self._pins.get(session_id)
        return None if pin is None else pin.expires_at - self._clock()

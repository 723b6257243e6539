"""`Parts`: where the time of a piece of work went, part by part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Parts(dict[str, float]):
    """Seconds by part, in the order in which they ended first."""

    def add(self, others: Mapping[str, float]) -> None:
        """Add the seconds of other work."""
        for part, seconds in others.items():
            self[part] = self.get(part, 0.0) + seconds

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the block's time to `part`, however the block ends; the time of parts within it is theirs alone."""
        start, before = time.perf_counter(), sum(self.values())
        try:
            yield
        finally:
            of_others = sum(self.values()) - before
            self[part] = self.get(part, 0.0) + time.perf_counter() - start - of_others

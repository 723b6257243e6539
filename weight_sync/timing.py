"""`Parts`: where the time of a piece of work went, part by part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Parts(dict[str, float]):
    """Seconds by part, in the order of their first use."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the block's time to `part`, however the block ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self[part] = self.get(part, 0.0) + time.perf_counter() - start

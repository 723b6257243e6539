"""A device that does everything as late as it may: work runs at the fence that waits for it, no sooner.

Stands in for the streams of a CUDA device behind `weight_sync.staging.DeviceQueue`.  Its traps are a GPU's: a call
that returned has done nothing yet; threads' streams are in no order with each other; a step that was launched reads the
weights when it runs, not when it was launched.  Work that is still pending when its memory is reused reads the
new content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Work = Callable[[], object]


class LateDevice:
    """`thread`: the thread whose stream is current; a test sets it in place of real threads."""

    def __init__(self) -> None:
        self.thread = "io"
        self._streams: dict[str, deque[Work]] = {}

    def launch(self, step: Work) -> None:
        """Enqueue a step on the stream of steps."""
        self._stream("steps").append(step)

    def put(self, work: Work) -> None:
        self._stream(self.thread).append(work)

    def fence(self) -> None:
        self._run(self.thread)

    def fence_device(self) -> None:
        for thread in sorted(self._streams):
            self._run(thread)

    @property
    def num_pending(self) -> int:
        return sum(map(len, self._streams.values()))

    def _stream(self, thread: str) -> deque[Work]:
        return self._streams.setdefault(thread, deque())

    def _run(self, thread: str) -> None:
        stream = self._stream(thread)
        while stream:
            stream.popleft()()

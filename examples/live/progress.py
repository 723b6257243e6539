"""Lines of progress: one for each event, and one whenever nothing was printed for some seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

QUIET_S = 8.0


class ProgressLines:
    """Prints lines with the time since the start.

    `doing` names the present work and prints nothing.  A thread repeats that name when the last line is `quiet_s` old.
    """

    def __init__(self, write: Callable[[str], None], quiet_s: float = QUIET_S) -> None:
        self._write = write
        self._quiet_s = quiet_s
        self._started = self._last = time.monotonic()
        self._work = "starting"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def line(self, text: str) -> None:
        with self._lock:
            self._last = time.monotonic()
            minutes, seconds = divmod(int(self._last - self._started), 60)
            self._write(f"[{minutes:2d}:{seconds:02d}] {text}")

    def doing(self, work: str) -> None:
        self._work = work

    def _repeat(self) -> None:
        while not self._ended.wait(max(self._last + self._quiet_s - time.monotonic(), 0.05)):
            if time.monotonic() - self._last >= self._quiet_s:
                self.line(f"{self._work} ...")

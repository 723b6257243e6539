"""Child processes: started, watched, and always ended."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

STOP_S = 20.0
KILL_S = 5.0
LOG_LINES = 15
# A server and a trainer share the cores: compute threads that spin while they wait would slow the other tenfold.
DEFAULT_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}


class ChildProcess:
    """A process in a session of its own, so that Ctrl-C reaches only its parent, which then ends it in order.

    Its standard error goes to `log_path`; its standard output there too, or, with `reads_output`, into `next_line`.
    Leaving the context ends the process: SIGTERM, and SIGKILL after `STOP_S` seconds.
    """

    def __init__(self, name: str, command: Sequence[str], log_path: Path, *, reads_output: bool = False) -> None:
        self.name = name
        self.log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if reads_output else log,
                stderr=log,
                start_new_session=True,
                env=DEFAULT_ENVIRONMENT | os.environ,
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        if self._process.stdout is not None:
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        """Return the exit status: None while it runs; negative for a signal."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the process, and return its exit status.  Raises `subprocess.TimeoutExpired`."""
        return self._process.wait(timeout_s)

    def next_line(self, timeout_s: float) -> bytes | None:
        """Return the next line of its standard output, None at the end.  Raises `queue.Empty` after `timeout_s`."""
        return self._lines.get(timeout=timeout_s)

    def stop(self) -> int:
        """End the process, if it has not ended, and return its exit status."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait(KILL_S)

    def last_words(self) -> str:
        """Return the last lines of its log."""
        with self.log_path.open(encoding="utf-8", errors="replace") as log:
            return "".join(deque(log, maxlen=LOG_LINES)).rstrip()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)


def seconds_left(deadline: float) -> float:
    """Return the seconds until the monotonic time `deadline`, at least 0."""
    return max(deadline - time.monotonic(), 0.0)

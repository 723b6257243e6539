"""A worker process: started, asked in JSON lines, stopped and continued with its whole process group, ended.

The worker's end is `workers/protocol.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

STOP_S = 15.0


class WorkerError(Exception):
    """A worker failed, died or did not answer in time; the message is one line and names the log."""


class Worker:
    """A process with a session of its own, so that Ctrl-C at the terminal reaches only the process that cleans up."""

    def __init__(self, command: list[str], folder: Path, variables: dict[str, str], log: Path) -> None:
        self._log = log
        self._buffer = b""
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id of the worker, which is also the number of its process group."""
        return self._process.pid

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Receive the next reply.  Raises `WorkerError`, also for a reply that is an error."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise WorkerError(f"no answer within {timeout_s:.0f} s (log: {self._log})")
            part = os.read(descriptor, 1 << 20)
            if not part:
                status = self._process.wait(STOP_S)
                raise WorkerError(f"ended with status {status} (log: {self._log})")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{reply['error']} (log: {self._log})")
        return reply

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply.  Raises `WorkerError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"it has ended (log: {self._log})") from None
        return self.receive(timeout_s)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Close the worker's input, and after a while send SIGKILL to everything in its group."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.thaw()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait(STOP_S)
        self._process.stdout.close()

    def kill(self) -> None:
        """Send SIGKILL to everything in the group, stopped or not."""
        self._signal(signal.SIGKILL)
        self._process.wait(STOP_S)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

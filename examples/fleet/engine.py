"""An engine of the fleet: a Ray actor that keeps `lockstep serve` as its child.

`python -m examples.fleet.engine serve ...` is `lockstep serve` that ends with the process that started it, however that
ends: an actor that Ray kills leaves no engine behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.entrypoints import cli
from rollout.entrypoints.child_process import ChildProcess
from rollout.entrypoints.server_info import flag_words
from weight_sync.process_group import free_port

WATCH_EVERY_S = 0.05
_PR_SET_PDEATHSIG = 1


class EngineActor:
    """Starts its engine at once.  `settings`: those of the server, but the port."""

    def __init__(self, name: str, settings: dict[str, Any], log_path: str) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        words = flag_words({**settings, "served_model_name": name, "port": port})
        command = [sys.executable, "-m", "examples.fleet.engine", str(os.getpid()), "serve", *words]
        self._process = ChildProcess(name, command, Path(log_path))

    async def address(self) -> tuple[str, int]:
        """The engine's URL and process id."""
        return self._url, self._process.pid

    async def ended(self) -> str:
        """Wait for the end of the engine; its exit status and last words."""
        while self._process.exit_status() is None:
            await asyncio.sleep(WATCH_EVERY_S)
        return f"exit status {self._process.exit_status()}\n{self._process.last_words()}"

    async def stop(self) -> int:
        """End the engine in order; its exit status."""
        return await asyncio.to_thread(self._process.stop)


def main(argv: Sequence[str]) -> int:
    """The words of `lockstep`, after the id of the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(argv[0]):
        return 1  # it has ended already
    return cli.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

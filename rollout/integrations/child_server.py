"""A server as a child of a framework's process, for engines that the framework starts itself."""

from __future__ import annotations

import asyncio
import atexit
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.client import AsyncRolloutClient
from rollout.core.errors import StartupError
from rollout.http.server_info import flag_words
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

POLL_S = 0.2


class ChildServer:
    """A `lockstep serve` with these settings and further words.  It starts at once, and ends with this process."""

    def __init__(self, settings: Mapping[str, Any], words: Sequence[str] = ()) -> None:
        self.port = int(settings.get("port") or free_port())
        self.url = f"http://{settings.get('host', '127.0.0.1')}:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-")
        settings = {**settings, "port": self.port}
        command = [sys.executable, "-m", "rollout.cli.main", "serve", *flag_words(settings), *words]
        self._process = ChildProcess("server", command, Path(self._folder.name) / "server.log")
        atexit.register(self.stop)

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return once it serves.  Raises `StartupError` with its last words if it ends, or is late."""
        deadline = time.monotonic() + timeout_s
        async with AsyncRolloutClient(self.url) as client:
            while not await client.health():
                if self._process.exit_status() is not None or time.monotonic() > deadline:
                    raise StartupError(f"the server did not start: {self._process.last_words()}")
                await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        """End the server, if it has not ended."""
        atexit.unregister(self.stop)
        self._process.stop()
        self._folder.cleanup()

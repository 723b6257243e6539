"""An engine of the fleet: a Ray actor that keeps `lockstep serve` as its child."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from examples.fleet.tether import tethered
from rollout.http.server_info import flag_words
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

WATCH_EVERY_S = 0.05


class EngineActor:
    """An actor that starts its engine at once; both end together.  `settings`: of the server, without the port."""

    def __init__(self, name: str, settings: dict[str, Any], log_path: str) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        words = flag_words({**settings, "served_model_name": name, "port": port})
        self._process = ChildProcess(name, tethered("rollout.cli.main", "serve", *words), Path(log_path))

    async def address(self) -> tuple[str, int]:
        """Return the engine's URL and process id."""
        return self._url, self._process.pid

    async def ended(self) -> str:
        """Wait for the end of the engine; return its exit status and last words."""
        while self._process.exit_status() is None:
            await asyncio.sleep(WATCH_EVERY_S)
        return f"exit status {self._process.exit_status()}\n{self._process.last_words()}"

    async def stop(self) -> int:
        """End the engine in order; return its exit status."""
        return await asyncio.to_thread(self._process.stop)

"""vllm-router as it comes from PyPI, in front of the engines.  Workers come and go by `/workers`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import httpx

from examples.fleet.errors import FleetError
from examples.fleet.tether import tethered
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

READY_S = 60.0
CALL_S = 10.0
POLL_S = 0.1


class Router:
    """The router, started on entering and ended on leaving.  Its log is `router.log` in `folder`.

    It repeats nothing by itself (`--disable-retries`), so that each sample that died is seen, and sent again, here.
    """

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = tethered(
            *("vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(free_port()), "--policy", "round_robin", "--disable-retries"),
        )
        self._process = ChildProcess("router", command, folder / "router.log")
        self._http = httpx.AsyncClient(base_url=self.url, timeout=CALL_S, trust_env=False)

    async def __aenter__(self) -> Self:
        deadline = time.monotonic() + READY_S
        try:
            while not await self._answers():
                if self._process.exit_status() is not None or time.monotonic() > deadline:
                    raise FleetError(f"the router did not start: {self._process.last_words()}")
                await asyncio.sleep(POLL_S)
        except BaseException:
            self._process.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
        self._process.stop()

    def require_running(self) -> None:
        """Raise `FleetError` if the router has ended."""
        if (status := self._process.exit_status()) is not None:
            raise FleetError(f"the router ended with status {status}: {self._process.last_words()}")

    async def add(self, url: str) -> None:
        """Let requests go to this engine from now on."""
        await self._call("POST", "/workers", {"url": url})

    async def remove(self, url: str) -> None:
        """Let no more requests go to this engine.  An engine that is not listed is no error."""
        listed = (await self._call("GET", "/workers")).json()["workers"]
        if any(worker["url"] == url for worker in listed):
            await self._call("DELETE", f"/workers/{quote(url, safe='')}")

    async def _answers(self) -> bool:
        try:
            return (await self._http.get("/workers")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def _call(self, method: str, path: str, body: dict[str, str] | None = None) -> httpx.Response:
        try:
            return (await self._http.request(method, path, json=body)).raise_for_status()
        except httpx.HTTPError as error:
            raise FleetError(f"router: {method} {path}: {type(error).__name__}: {error}") from None

"""Makes this server known to a router, keeps it known, and takes it off the router's list before the server drains.

`/workers` as sglang-router, smg and vllm-router serve it:

    GET /workers -> {"workers": [{"url", "id"?}]}    POST /workers {"url", "api_key"?}    DELETE /workers/{id or url}

sglang-router and smg answer a POST with 202 and list the worker later, when they have called it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from rollout.core.args.server_args import ServerArgs

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
CHECK_EVERY_S = 10.0
"""A router that was restarted has forgotten its workers."""
RETRY_EVERY_S = 1.0
LOOK_EVERY_S = 0.1
"""Seconds between two looks for a worker that the router has yet to list."""
_WILDCARDS = ("", "0.0.0.0", "::")


class _Worker(msgspec.Struct):
    url: str
    id: str | None = None


class _Listing(msgspec.Struct):
    workers: list[_Worker]


class RouterRegistration:
    """One server at one router, or, with `router_url` None, at none."""

    def __init__(
        self,
        router_url: str | None,
        own_url: str,
        api_key: str | None = None,
        check_every_s: float = CHECK_EVERY_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare the registration.  `transport` is for tests."""
        self._router_url = router_url
        self._own_url = own_url
        self._body = {"url": own_url} | ({} if api_key is None else {"api_key": api_key})
        self._check_every_s = check_every_s
        self._http = httpx.AsyncClient(timeout=CALL_TIMEOUT_S, trust_env=False, transport=transport)
        self._is_coming = False  # the router was notified, and has not listed this server since
        self._last_objection: str | None = None
        self._task: asyncio.Task[None] | None = None

    def join(self) -> None:
        """Register now, as soon as the router answers, and again whenever it does not list this server."""
        if self._router_url is not None:
            self._task = asyncio.create_task(self._keep())

    async def leave(self) -> None:
        """Take the server off the router's list, also where it is on its way there.

        A router that does not answer is given up after some seconds.  Raises nothing, as the server drains after this.
        """
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                while (name := await self._listed()) is None and self._is_coming:
                    await asyncio.sleep(LOOK_EVERY_S)
                if name is not None:
                    await self._call("DELETE", f"/workers/{quote(name, safe='')}")
                    logger.info("%s removed %s from its list", self._router_url, self._own_url)
        except Exception as error:
            logger.warning("%s may still list %s: %s", self._router_url, self._own_url, _describe(error))
        with contextlib.suppress(Exception):
            await self._http.aclose()

    async def _keep(self) -> None:
        while True:
            wait_s = self._check_every_s
            try:
                if await self._listed() is None:
                    self._is_coming = True  # even if the call fails
                    await self._call("POST", "/workers", json=self._body)
                    logger.info("registered at %s as %s", self._router_url, self._own_url)
                self._last_objection = None
            except Exception as error:  # not only httpx's: a resolver's UnicodeError is none
                wait_s = min(wait_s, RETRY_EVERY_S)
                if _describe(error) != self._last_objection:
                    self._last_objection = _describe(error)
                    logger.warning("not registered at %s: %s", self._router_url, self._last_objection)
            await asyncio.sleep(wait_s)

    async def _listed(self) -> str | None:
        """Return the router's id of this server; None if it does not list it.  Raises `msgspec.DecodeError`."""
        reply = await self._call("GET", "/workers")
        for worker in msgspec.json.decode(reply.content, type=_Listing).workers:
            if worker.url.rstrip("/") == self._own_url:
                self._is_coming = False
                return worker.id or worker.url
        return None

    async def _call(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Call the router.  Raises `httpx.HTTPError`, also for an unsuccessful answer."""
        assert self._router_url is not None
        reply = await self._http.request(method, self._router_url.rstrip("/") + path, **content)
        return reply.raise_for_status()


def own_url(args: ServerArgs) -> str:
    """Return this server's URL for the router: of `--host`, or, if that is all addresses, the one facing the router."""
    host = args.host
    if host in _WILDCARDS and args.register_url is not None:
        host = _address_facing(args.register_url) or host
    return f"http://{f'[{host}]' if ':' in host else host}:{args.port}"


def _address_facing(url: str) -> str | None:
    """Return the address of this machine that packets to the host of `url` leave from.  Nothing is sent."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
            return own
    return None


def _describe(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.request.method} {error.request.url}: {error.response.status_code} {error.response.text[:200]}"
    if isinstance(error, TimeoutError):
        return f"it did not answer, or has yet to list it, after {CALL_TIMEOUT_S:g} s"
    return str(error) or type(error).__name__

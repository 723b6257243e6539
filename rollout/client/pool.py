"""`OneByOne`: connections for thousands of requests at once.

httpx looks through all of its connections, and through all pairs of idle ones, whenever a request begins or ends: with
a thousand connections that takes longer than the requests.  Here each connection is a pool of its own, and free ones
lie on a stack.  Thousands that connect at once would all be late, so of generations a few connect at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import AsyncIterator

import httpx

GENERATION = "rollout.generation"
"""Extension of a request that may wait for others to connect."""
_MAX_CONNECTING = 64


class OneByOne(httpx.AsyncBaseTransport):
    """A transport of any number of connections; a connection that is idle for `keepalive_s` is closed."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._connecting = asyncio.Semaphore(_MAX_CONNECTING)
        self._ssl = httpx.create_ssl_context(trust_env=False)
        self._free: deque[tuple[httpx.AsyncHTTPTransport, float]] = deque()  # and since when; the latest is last

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connection = self._free.pop()[0] if self._free else None
        async with contextlib.AsyncExitStack() as gate:
            if connection is None:
                connection = self._new()
                if GENERATION in request.extensions:
                    await gate.enter_async_context(self._connecting)
                    request.extensions["trace"] = functools.partial(_open_when_connected, gate)
            try:
                response = await connection.handle_async_request(request)
            except BaseException:
                await connection.aclose()
                raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, connection, self)
        return response

    async def aclose(self) -> None:
        while self._free:
            await self._free.pop()[0].aclose()

    async def put_back(self, connection: httpx.AsyncHTTPTransport) -> None:
        """Take a connection back for the next request, open or not."""
        now = time.monotonic()
        self._free.append((connection, now))
        while self._free[0][1] < now - self._keepalive_s:
            await self._free.popleft()[0].aclose()

    def _new(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=self._keepalive_s)
        return httpx.AsyncHTTPTransport(verify=self._ssl, trust_env=False, limits=limits)


async def _open_when_connected(gate: contextlib.AsyncExitStack, event: str, info: object) -> None:
    if event == "connection.connect_tcp.complete":
        await gate.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of an answer; closing it frees its connection."""

    def __init__(self, stream: httpx.AsyncByteStream, connection: httpx.AsyncHTTPTransport, pool: OneByOne) -> None:
        self._stream, self._connection, self._pool = stream, connection, pool
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._stream.aclose()
            await self._pool.put_back(self._connection)

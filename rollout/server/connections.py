"""Limits on the number of connections, and on the time that a client may take to send a request.

up to most                 all requests
the next few               health and control; anything else is 503 (`is_over_limit` in the request's state)
beyond                     503 at once, so that the process never runs out of file descriptors
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import resource
import time
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn

from rollout.core.errors import StartupError
from rollout.http.native.short_generate import ShortGenerate
from rollout.server.checks import LISTEN_BACKLOG
from rollout.server.plain_requests import PlainProtocol
from rollout.server.short_requests import ShortWay

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16384
ACCEPTED_AT_ONCE = 64
"""Connections accepted in a row before any is served: asyncio accepts as many as uvicorn's backlog."""
SPARE_CONNECTIONS = 64
"""Connections for health and control, when all others are in use."""
OTHER_FILES = 128
"""Descriptors for sockets between processes, logs and files."""
LEAST_BYTES_PER_S = 128 * 1024
"""A request that comes at least as fast may take longer than its deadline."""
SWEEP_TICKS = 10
"""Ticks of uvicorn's, of 0.1 s, in which all connections are looked at: thousands in one would take some 10 ms."""
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: 78\r\n\r\n"
    b'{"error": {"type": "Unavailable", "message": "too many connections are open"}}'
)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return the limit now in force."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def connections_within(file_limit: int) -> int:
    """Return how many connections fit below a limit of open files.  Raises `StartupError` if none does."""
    most = min(MAX_CONNECTIONS, file_limit - SPARE_CONNECTIONS - 2 * ACCEPTED_AT_ONCE - OTHER_FILES)
    if most < 1:
        raise StartupError(f"the limit of {file_limit} open files is too low for a server: raise `ulimit -n`")
    return most


class BoundedServer(uvicorn.Server):
    """uvicorn with at most `most` connections, whose clients have `receive_timeout_s` to send a request.

    `short_generate` answers what it can, `app` all else.  It installs no signal handlers: its caller decides when to
    stop.
    """

    def __init__(
        self,
        app: Any,
        *,
        most: int,
        receive_timeout_s: float,
        short_generate: ShortGenerate | None = None,
        **settings: Any,
    ) -> None:
        short_way = None if short_generate is None else ShortWay(short_generate)
        protocol: Any = functools.partial(_Protocol, most, short_way=short_way)
        super().__init__(
            uvicorn.Config(app, http=protocol, backlog=ACCEPTED_AT_ONCE, lifespan="off", ws="none", **settings)
        )
        self._receive_timeout_s = receive_timeout_s
        self._unswept: list[_Protocol] = []
        self._swept_at_once = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(LISTEN_BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        self._close_overdue()
        return await super().on_tick(counter)

    def _close_overdue(self) -> None:
        """Check the next connections, and close the overdue ones."""
        if not self._unswept:
            self._unswept = list(self.server_state.connections)  # type: ignore[arg-type]
            self._swept_at_once = -(-len(self._unswept) // SWEEP_TICKS)
        now = time.monotonic()
        for _ in range(min(self._swept_at_once, len(self._unswept))):
            connection = self._unswept.pop()
            if connection.seconds_sending(now) > self._receive_timeout_s:
                connection.transport.abort()


class _Protocol(PlainProtocol):
    """One connection."""

    def __init__(self, most: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.app_state: dict[str, Any]
        self._most = most
        self._is_refused = False
        self._num_bytes = 0
        self._since: tuple[float, object, int] | None = None  # when this cycle was first seen unsent; bytes before

    def connection_made(self, transport: Any) -> None:
        count = len(self.connections)
        if count >= self._most + SPARE_CONNECTIONS:
            self._is_refused = True
            transport.write(_REFUSAL)
            transport.close()
            return
        if count >= self._most:
            self.app_state = self.app_state | {"is_over_limit": lambda: len(self.connections) > self._most}
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_refused:
            super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer, and cancel the request at work on this connection: its client cannot be answered any more."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with contextlib.suppress(h11.LocalProtocolError):  # its answer has begun
            super().send_400_response(msg)
        self.transport.close()

    def seconds_sending(self, now: float) -> float:
        """Return how long the client has been sending an incomplete request, less what its bytes have earned it.

        0 while the server is at work, or nothing is sent.  Must be called periodically.
        """
        cycle = self.cycle
        is_idle = cycle is not None and cycle.response_complete and self.is_idle
        is_served = cycle is not None and not (cycle.more_body or cycle.response_complete)
        if (is_idle and not cycle.more_body) or is_served or self.flow.read_paused:
            self._since = None
        elif self._since is None or self._since[1] is not cycle:
            self._since = now, cycle, self._num_bytes
        if self._since is None:
            return 0.0
        began, _, num_bytes = self._since
        return now - began - (self._num_bytes - num_bytes) / LEAST_BYTES_PER_S


def quiet_about_files(loop: asyncio.AbstractEventLoop) -> None:
    """Log once a minute that no connection can be accepted for want of files, not thousands of times a second."""
    logged_at = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_at
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif time.monotonic() - logged_at > 60.0:
            logged_at = time.monotonic()
            logger.error("connections cannot be accepted: %s", error)

    loop.set_exception_handler(handle)

"""Requests of the usual form are read, and answered, without h11, which takes longer than all else that uvicorn does.

The usual form: HTTP/1.1, a plain method, a path, headers that each stand on a line and need no further rule, and a body
of a stated length.  h11 reads everything else, and refuses what is not valid: a request is of the usual form, or h11
sees all of its bytes.

    data_received -- the head of a request, between two requests -- usual form --> ShortCycle or PlainCycle
                     '---------------------------------------------- any other --> h11, until that request is over
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from rollout.http.io import NOTE_PASSED, WATCH_DISCONNECT
from rollout.http.native.short_generate import OnPassed
from rollout.server.heads import HEAD_LINES, Headers, read_head
from rollout.server.short_requests import ShortCycle, ShortWay

MAX_HEAD_BYTES = 16 * 1024
_NO_BODY = frozenset({204, 304})


class PlainCycle(RequestResponseCycle):
    """A request and its answer on a connection that h11 takes for idle.

    Its scope has `WATCH_DISCONNECT`.
    """

    def __init__(self, protocol: H11Protocol, scope: Any) -> None:
        super().__init__(
            scope=scope,
            conn=protocol.conn,
            transport=protocol.transport,
            flow=protocol.flow,
            logger=protocol.logger,
            access_logger=protocol.access_logger,
            access_log=False,
            default_headers=protocol.server_state.default_headers,
            message_event=asyncio.Event(),
            on_response=protocol.on_response_complete,
        )
        scope["extensions"] = {WATCH_DISCONNECT: self._watch}
        self._on_disconnect: Callable[[], None] | None = None
        self._head: bytes = b""  # waits for the body, so that both leave in one piece
        self._missing: int | None = None  # bytes of the answer's body, where its length is stated
        self._is_chunked = False
        self._has_body = True

    def _watch(self, on_disconnect: Callable[[], None]) -> Callable[[], None]:
        """Call `on_disconnect` once if the client disconnects before the end of the watch, which is returned.

        If it has disconnected already, the call comes in the next pass of the event loop, when the work waits.
        """
        self._on_disconnect = on_disconnect
        self.flow.resume_reading()  # after a long body nothing is read, not even the end of the connection
        if self.disconnected:
            asyncio.get_running_loop().call_soon(self.note_disconnect)
        return self._end_watch

    def _end_watch(self) -> None:
        self._on_disconnect = None

    def note_disconnect(self) -> None:
        """Tell the watch, and end it."""
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        if on_disconnect is not None and not self.response_complete:
            on_disconnect()

    async def run_asgi(self, app: Any) -> None:
        try:
            await super().run_asgi(app)
        finally:
            self.scope["extensions"].clear()  # it holds this cycle, which holds it

    async def send(self, message: Any) -> None:
        """Send a part of the answer.  Raises `h11.LocalProtocolError` where h11 would."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.response_started else "http.response.start"
        assert not self.response_complete and message["type"] == expected, message["type"]
        if not self.response_started:
            self._start(message["status"], self.default_headers + list(message.get("headers", ())))
        else:
            self._send_part(message.get("body", b""), message.get("more_body", False))

    def _start(self, status: int, headers: Headers) -> None:
        self.response_started = True
        self._has_body = status not in _NO_BODY
        for name, value in headers:
            if name == b"content-length":
                self._missing = int(value)
        self._is_chunked = self._has_body and self._missing is None
        if CLOSE_HEADER in headers:
            self.keep_alive = False
        if self._is_chunked:
            headers.append((b"Transfer-Encoding", b"chunked"))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers) or b"\0" in lines:
            raise h11.LocalProtocolError("a header of the answer holds the end of a line")
        self._head = b"%b%b\r\n" % (HEAD_LINES[status], lines)
        if self._is_chunked:  # the parts of its body may come much later
            self.transport.write(self._head)
            self._head = b""

    def _send_part(self, body: bytes, more_body: bool) -> None:
        if self._missing is not None and self._has_body:
            self._missing -= len(body)
            if self._missing < 0 or (self._missing > 0 and not more_body):
                raise h11.LocalProtocolError("the answer's body has another length than its header states")
        if not self._has_body:
            data = self._head
        elif self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            data += b"" if more_body else b"0\r\n\r\n"
        else:
            data = self._head + body if self._head else body
        self._head = b""
        if data:
            self.transport.write(data)
        if not more_body:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


_OWN = (PlainCycle, ShortCycle)


class PlainProtocol(H11Protocol):
    """uvicorn's protocol, with the short way for requests of the usual form."""

    def __init__(self, *args: Any, short_way: ShortWay | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.access_log = self.access_log and self.config.access_log  # a logger may have handlers of others
        self._short_way = short_way
        self._idle_since: float | None = None  # when the last answer ended, until the next request begins
        self._missing = 0  # bytes of the body of a plain request that have yet to come
        self._held = b""  # what came after a plain request that is not yet answered

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        is_between = not self._missing and (not isinstance(cycle, _OWN) or cycle.response_complete)
        if is_between and self._begin(data):
            return
        if self._missing:
            self._take_body(data)
        elif isinstance(self.cycle, _OWN) and not self.cycle.response_complete:
            self._hold(data)
        else:
            super().data_received(data)

    @property
    def is_idle(self) -> bool:
        """True between an answer and the first byte of the next request."""
        return self._idle_since is not None

    def _begin(self, data: bytes) -> bool:
        """Begin the request at the start of `data` if it is of the usual form; else return False, having done nothing.

        `data` must come between two requests.
        """
        conn = self.conn
        if self.access_log or conn.our_state is not h11.IDLE or conn.their_state is not h11.IDLE:
            return False
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0 or conn.trailing_data != (b"", False):
            return False
        if self._begin_short(data, end):
            return True
        found = read_head(data[:end])
        if found is None:
            return False
        self._unset_keepalive_if_required()
        self._missing = found[3]
        self.cycle = self._plain_cycle(found)
        self._take_body(data[end + 4 :])
        self._run(self.cycle)
        return True

    def _begin_short(self, data: bytes, end: int) -> bool:
        """Begin the request, whose head ends at `end`, on the short way if it may take that."""
        way = self._short_way
        if way is None or self.flow.write_paused or "is_over_limit" in self.app_state:
            return False
        head = data[:end]
        known = way.known(head)
        if known is None:
            return False
        self._unset_keepalive_if_required()
        self._missing, is_binary = known
        self.cycle = ShortCycle(self, way, head, is_binary)  # type: ignore[assignment]
        self._take_body(data[end + 4 :])
        return True

    def take_long_way(self, short: ShortCycle, on_passed: OnPassed | None) -> None:
        """Have the application answer a request that the short way did not take in."""
        found = read_head(short.head)
        assert found is not None
        cycle = self._plain_cycle(found)
        extensions: Any = cycle.scope["extensions"]
        extensions[NOTE_PASSED] = on_passed
        cycle.body, cycle.more_body, cycle.keep_alive = short.body, False, short.keep_alive
        cycle.message_event.set()
        self.cycle = cycle
        self._run(cycle)

    def _plain_cycle(self, found: tuple[bytes, bytes, Headers, int]) -> PlainCycle:
        """Return the cycle of a request that `read_head` found."""
        method, target, self.headers, _ = found
        raw_path, _, query_string = target.partition(b"?")
        path = raw_path.decode("ascii")
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,  # type: ignore[typeddict-item]
            "method": method.decode("ascii"),
            "root_path": self.root_path,
            "path": self.root_path + (unquote(path) if "%" in path else path),
            "raw_path": self.root_path.encode("ascii") + raw_path,
            "query_string": query_string,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        return PlainCycle(self, self.scope)

    def _run(self, cycle: PlainCycle) -> None:
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _take_body(self, data: bytes) -> None:
        """Take the next bytes of the body, and hold the bytes behind it.  Drop a body whose request is answered."""
        cycle, rest = self.cycle, data[self._missing :]
        self._missing -= len(data) - len(rest)
        if not cycle.response_complete:
            cycle.body += data[: len(data) - len(rest)] if rest else data
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
        cycle.more_body = self._missing > 0
        cycle.message_event.set()
        if isinstance(cycle, ShortCycle) and not cycle.more_body:
            cycle.begin()
        if rest and cycle.response_complete:
            self.data_received(rest)
        elif rest:
            self._hold(rest)

    def _hold(self, data: bytes) -> None:
        """Keep what came behind a request.  Go on reading while it is little, to see a client that leaves."""
        self._held += data
        if len(self._held) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _unset_keepalive_if_required(self) -> None:
        """Note that the client is not idle.  The timer runs on: setting one anew takes a twentieth of a request."""
        self._idle_since = None

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for as long as it may."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0.0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def on_response_complete(self) -> None:
        """Do as uvicorn does, but keep a timer that runs."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self.flow.resume_reading()
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.DONE:
            self.conn.start_next_cycle()
            self.handle_events()
        if self._held and not self._missing and not self.transport.is_closing():
            held, self._held = self._held, b""
            self.data_received(held)

    def connection_lost(self, error: Exception | None) -> None:
        cycle = self.cycle
        super().connection_lost(error)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if isinstance(cycle, _OWN):
            cycle.note_disconnect()

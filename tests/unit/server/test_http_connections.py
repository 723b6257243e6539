"""`BoundedServer` over real sockets: the log after a client that speaks no HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

from rollout.server.connections import BoundedServer

LONG = b"x" * 65536
BEGUN = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSING = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer 401 before the body has arrived."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
        pass
    await refuse(scope, receive, send)


async def talk(app: Any, *parts: bytes) -> bytes:
    """Send the parts one after the other, and return what the server sends until it closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = BoundedServer(app, most=10, receive_timeout_s=5.0, log_config=None)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.05)
    answer = await asyncio.wait_for(reader.read(), 5.0)
    writer.close()
    server.should_exit = True
    await serving
    return answer


@pytest.mark.parametrize("app", [refuse, read_all])
@pytest.mark.parametrize("parts", [(BEGUN + b"zz\r\n",), (BEGUN, b"zz\r\n"), (BEGUN, b"2\r\n{}\r\n", b"zz\r\n")])
def test_broken_chunks_end_the_connection_and_leave_no_traceback(
    app: Any, parts: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = asyncio.run(talk(app, *parts))
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
    assert_quiet(caplog)


def assert_quiet(caplog: pytest.LogCaptureFixture) -> None:
    assert all(record.exc_info is None and record.levelno < logging.ERROR for record in caplog.records), caplog.text


@pytest.mark.parametrize(
    "parts",
    [
        (b"GET /", LONG),
        (b"GET / HTTP/1.1\r\n", b"x: ", LONG),
        (b"GET / HTTP/1.1\r\n", 3000 * b"name: a value of some length\r\n"),
        (BEGUN, b"0\r\n", b"x: ", LONG),
        (BEGUN, b"2;", LONG),
    ],
    ids=["path", "header", "headers", "trailer", "chunk extension"],
)
def test_what_is_no_body_has_a_most_size(parts: tuple[bytes, ...], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        answer = asyncio.run(talk(read_all, *parts))
    assert answer.startswith(b"HTTP/1.1 400")
    assert_quiet(caplog)


def test_a_body_of_small_chunks_may_have_more_framing_than_that() -> None:
    answer = asyncio.run(talk(read_all, CLOSING + 40_000 * b"1\r\nx\r\n" + b"0\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 401")

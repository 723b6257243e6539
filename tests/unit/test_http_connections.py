"""`BoundedServer` over real sockets: what a client that speaks no HTTP leaves in the log."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

from rollout.entrypoints.connections import BoundedServer

BEGUN = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answers before the body is there."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (message := await receive())["type"] != "http.disconnect" and message.get("more_body"):
        pass
    await refuse(scope, receive, send)


async def talk(app: Any, *parts: bytes) -> bytes:
    """What a client gets that sends the parts one after the other, until the server closes."""
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
    assert all(record.exc_info is None and record.levelno < logging.ERROR for record in caplog.records), caplog.text

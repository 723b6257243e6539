"""A server for client tests: real HTTP, canned answers, and a record of the requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse


@dataclass
class Asked:
    method: str
    path: str
    body: Any
    headers: dict[str, str]


@dataclass
class CannedServer:
    """`answers[path]` is what the path answers: JSON content, a `Response`, or a function of the body giving either."""

    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def answer(path: str, request: Request) -> Response:
            raw = await request.body()
            body = json.loads(raw) if raw else None
            self.asked.append(Asked(request.method, "/" + path, body, dict(request.headers)))
            content = self.answers["/" + path]
            content = content(body) if callable(content) and not isinstance(content, Response) else content
            return content if isinstance(content, Response) else json_response(content)

        return app

    def stream_forever(self, event: bytes) -> Callable[[Any], Response]:
        """Return a handler whose answer repeats `event` until the client goes away, which sets `disconnected`."""

        async def events() -> Any:
            try:
                while True:
                    yield event
                    await asyncio.sleep(0.01)
            finally:
                self.disconnected.set()

        return lambda body: StreamingResponse(events(), media_type="text/event-stream")


def json_response(content: Any, status: int = 200) -> Response:
    """Answer with JSON as msgspec writes it: characters outside ASCII as they are."""
    return Response(json.dumps(content, ensure_ascii=False).encode(), status, media_type="application/json")


def event_stream(contents: Sequence[Any], done: bool = True) -> StreamingResponse:
    """Answer with the contents as events, cut into chunks that respect no boundary."""
    text = b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in contents)
    text += b"data: [DONE]\n\n" if done else b""
    return StreamingResponse(iter([text[i : i + 7] for i in range(0, len(text), 7)]), media_type="text/event-stream")


@contextmanager
def serving(canned: CannedServer) -> Iterator[str]:
    """Serve on a free port of the loopback interface from a thread; gives the base URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(canned.app(), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline, "the canned server did not start"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive(), "the canned server did not stop"


@dataclass
class RawServer:
    """Answers the n-th connection with the bytes of `script[n]` (the last one again and again), and closes it.

    It listens from the start, hears one request a connection, and sends `pause_s` between two bytes, if that is given.
    """

    script: Sequence[bytes]
    pause_s: float = 0.0
    heard: list[bytes] = field(default_factory=list)

    def answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            with connection.makefile("rb") as request:  # all of it: a close before the end of it is a reset
                lines = list(iter(lambda: request.readline().rstrip(b"\r\n").lower(), b""))
                request.read(sum(int(line[15:]) for line in lines if line.startswith(b"content-length:")))
            self.heard.append(lines[0])
            content = self.script[min(len(self.heard), len(self.script)) - 1]
            for part in [content[i : i + 1] for i in range(len(content))] if self.pause_s else [content]:
                connection.sendall(part)
                time.sleep(self.pause_s)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve on a free port, and yield the base URL."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stop = threading.Event()

            def accept() -> None:
                while not stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        threading.Thread(target=self.answer, args=listener.accept()[:1], daemon=True).start()

            listener.settimeout(0.05)
            thread = threading.Thread(target=accept)
            thread.start()
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                stop.set()
                thread.join(10)


def raw_reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """Return the bytes of a whole HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body

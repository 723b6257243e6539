"""Requests of the usual form: read as h11 reads them, and answered with the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rollout.http.io import ClientGone, until_disconnect
from rollout.server import heads, plain_requests
from rollout.server.connections import BoundedServer
from rollout.server.heads import read_head
from rollout.server.plain_requests import PlainCycle, PlainProtocol

PIECES = [
    b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"get", b" ", b"  ", b"/", b"/generate", b"/a?b=%20c", b"*", b"/\xff",
    b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\n", b"\r", b"host: x", b"Host:y", b"host: x\r\nhost: x", b"content-length: 2",
    b"Content-Length:\t2 ", b"content-length: 2, 2", b"content-length: +2", b"content-length: -1", b"content-length: ",
    b"transfer-encoding: chunked", b"connection: close", b"Connection: keep-alive", b"connection: Keep-Alive, te",
    b"expect: 100-continue", b"upgrade: h2c", b"a:", b"a: b\x00", b"a: b c\td", b"a : b", b": b", b" folded",
    b"\tfolded", b"a\x7f: b", b"x-session-id: s\xe9", b"authorization: Bearer k", b"a:b:c", b"a",
]  # fmt: skip


def some_head(rng: random.Random) -> bytes:
    """Return a head that is often of the usual form, and often nearly so."""
    lines = [b"%b %b HTTP/1.1" % (rng.choice(PIECES[:5]), rng.choice(PIECES[8:11])), b"host: x"]
    lines += rng.sample(PIECES[18:], rng.randrange(4))
    if rng.random() < 0.3:
        lines.insert(rng.randrange(len(lines)), rng.choice(PIECES))
    head = (b"\r\n" if rng.random() < 0.9 else b"\n").join(lines)
    if rng.random() < 0.2:
        cut = rng.randrange(len(head))
        head = head[:cut] + rng.choice(PIECES) + head[cut:]
    return head


def read_by_h11(head: bytes) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], int]:
    """Return the same as `read_head`.  Raises `h11.RemoteProtocolError`."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(head + b"\r\n\r\n")
    request = connection.next_event()
    if not isinstance(request, h11.Request):
        raise h11.RemoteProtocolError("no request")
    assert not connection.they_are_waiting_for_100_continue
    length = 0
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            assert length < 10, "the body has no end"
            length += 1
            connection.receive_data(b"x")
    assert connection.their_state is h11.DONE and connection.our_state is h11.SEND_RESPONSE
    return request.method, request.target, list(request.headers), length


def disagreements(read: Callable[[bytes], Any]) -> int:
    """Return how many of many heads `read` takes for another request than h11 does.  Some are of the usual form."""
    rng, wrong, usual = random.Random(0), 0, 0
    for _ in range(4000):
        head = some_head(rng)
        mine = read(head)
        if mine is None:
            continue
        usual += 1
        try:
            wrong += mine != read_by_h11(head)
        except h11.RemoteProtocolError:
            wrong += 1
    assert usual > 400
    return wrong


def test_what_is_read_here_is_read_by_h11_in_the_same_way() -> None:
    assert disagreements(read_head) == 0


@pytest.mark.parametrize(
    "name, value",
    [
        ("_NAME", re.compile(rb".+", re.DOTALL)),
        ("_OTHER_BYTE", re.compile(rb"(?!)")),
        ("_RULED", frozenset()),
    ],
)
def test_the_comparison_finds_a_reader_without_a_rule(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, name, value)
    if name == "_RULED":  # h11 reads these, and does more than read them
        with pytest.raises(AssertionError):
            disagreements(read_head)
    else:
        assert disagreements(read_head) > 0


# --- over sockets ------------------------------------------------------------------------------------------------

LIST = b'{"a": 1}'
POST = b"POST /p%20q?x=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request: in one piece, in parts, without a body, or before the body has come."""
    path, body = scope["path"], b""
    if path != "/refused":
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message["body"]
            if not message["more_body"]:
                break
    text = f"{scope['method']} {path} {scope['query_string'].decode()} {dict(scope['headers'])} ".encode() + body
    status = 204 if path == "/none" else 200
    stated = [] if path in ("/parts", "/none") else [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-a", b"b"), *stated]})
    if path == "/parts":
        for part in (text[:5], b"", text[5:]):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        text = b""
    await send({"type": "http.response.body", "body": b"" if path == "/none" else text})


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[str, int]]:
    """Serve `app`, and yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    limits: dict[str, Any] = {"most": 10, "receive_timeout_s": 5.0, "timeout_graceful_shutdown": 1}
    server = BoundedServer(app, log_config=None, access_log=False, **limits)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield listener.getsockname()
    server.should_exit = True
    await task


async def talk(app: Any, parts: list[bytes]) -> bytes:
    """Send the parts one after the other, and return what comes until the server closes."""
    async with serving(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.02)
        answer = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
    return re.sub(rb"date: [^\r]*", b"date: now", answer)


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 5.0
    while not condition() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)


def body_of(path: bytes, length: int) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, length)


CASES = {
    "in one piece": [POST + LIST, LAST],
    "head and body": [POST, LIST, LAST],
    "byte by byte": [POST + LIST, *(bytes([each]) for each in POST + LIST), POST + LIST, LAST],
    "body in parts": [POST + LIST[:3], LIST[3:5], LIST[5:], LAST],
    "one behind the other": [POST + LIST + POST + LIST + LAST],
    "the next one in parts": [POST + LIST + POST[:20], POST[20:] + LIST + LAST],
    "no body": [b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n", LAST],
    "an answer in parts": [body_of(b"/parts", 8) + LIST, LAST],
    "refused before its body": [body_of(b"/refused", 8), LIST + LAST],
    "refused, and its body with the next": [body_of(b"/refused", 8) + LIST[:2], LIST[2:] + POST + LIST + LAST],
    "a large body": [body_of(b"/", 300_000), b"x" * 150_000, b"y" * 150_000, LAST],
    "a body in chunks between": [
        POST + LIST,
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nz\r\n0\r\n\r\n",
        POST + LIST,
        LAST,
    ],
}  # fmt: skip


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_the_answers_are_the_bytes_that_h11_writes(parts: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[Any] = []
    made = PlainCycle.__init__
    monkeypatch.setattr(PlainCycle, "__init__", lambda self, *given: (cycles.append(self), made(self, *given))[1])
    mine = asyncio.run(talk(echo, parts))
    assert cycles
    monkeypatch.setattr(plain_requests, "read_head", lambda head: None)
    num_plain = len(cycles)
    assert asyncio.run(talk(echo, parts)) == mine
    assert len(cycles) == num_plain and mine.startswith(b"HTTP/1.1 20")


@pytest.mark.parametrize("parts", [[POST + LIST, b"nonsense\r\n\r\n"], [POST + LIST + b"nonsense\r\n\r\n"]])
def test_what_is_no_request_is_refused_behind_one_that_is(parts: list[bytes]) -> None:
    answer = asyncio.run(talk(echo, parts))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"400"]


def answers_wrongly(headers: list[tuple[bytes, bytes]], *bodies: bytes) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": body is not bodies[-1]})

    return app


@pytest.mark.parametrize(
    "app",
    [
        answers_wrongly([(b"x", b"a\r\nb: c"), (b"content-length", b"0")], b""),
        answers_wrongly([(b"content-length", b"3")], b"ab", b"cd"),
        answers_wrongly([(b"content-length", b"3")], b"a", b"b"),
        answers_wrongly([]),
    ],
    ids=["a line in a header", "too long", "too short", "no body"],
)
def test_an_answer_that_is_not_valid_ends_the_connection(app: Any) -> None:
    answer = asyncio.run(talk(app, [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"]))
    assert b"b: c" not in answer and b"cd" not in answer and not answer.endswith(b"ab\r\n")


def test_a_client_that_leaves_cancels_the_work_without_a_task_that_waits_for_it() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            before = len(asyncio.all_tasks())
            work = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.02, lambda: seen.append(len(asyncio.all_tasks()) - before))
            await until_disconnect(scope, receive, work)
        except ClientGone as error:
            seen.append(error)

    async def run() -> None:
        async with serving(app) as address:
            _, writer = await asyncio.open_connection(*address)
            writer.write(POST + LIST)
            await asyncio.sleep(0.1)
            writer.close()
            await until(lambda: len(seen) == 2)

    asyncio.run(run())
    assert seen[0] == 0 and isinstance(seen[1], ClientGone)


def test_a_client_that_leaves_after_a_long_body_is_noticed() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append("body")
        try:
            await until_disconnect(scope, receive, asyncio.get_running_loop().create_future())
        except ClientGone as error:
            seen.append(error)

    async def run() -> None:
        async with serving(app) as address:
            _, writer = await asyncio.open_connection(*address)
            writer.write(body_of(b"/", 100_000))
            await asyncio.sleep(0.05)  # the body comes in one piece, which is more than is read ahead
            writer.write(b"x" * 100_000)
            await until(lambda: seen == ["body"])
            writer.close()
            await until(lambda: len(seen) == 2)

    asyncio.run(run())
    assert isinstance(seen[-1], ClientGone)


@pytest.mark.parametrize("writes", [[2], [1, 1], [1, 1, 1]])
def test_a_client_that_leaves_behind_more_requests_is_noticed(writes: list[int]) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append("began")
        try:
            await until_disconnect(scope, receive, asyncio.get_running_loop().create_future())
        except ClientGone as error:
            seen.append(error)

    async def run() -> None:
        async with serving(app) as address:
            _, writer = await asyncio.open_connection(*address)
            for count in writes:
                writer.write((POST + LIST) * count)
                await until(lambda: seen == ["began"])
                await asyncio.sleep(0.05)
            writer.close()
            await until(lambda: len(seen) == 2)

    asyncio.run(run())
    assert isinstance(seen[-1], ClientGone)


def test_a_client_that_left_before_the_work_ends_the_work_that_waits() -> None:
    seen: list[Any] = []

    async def at_once() -> int:
        return 1

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not seen:
            await asyncio.sleep(0.01)
        try:
            seen.append(await until_disconnect(scope, receive, at_once()))
            await until_disconnect(scope, receive, asyncio.get_running_loop().create_future())
        except BaseException as error:
            seen.append(error)

    async def run() -> None:
        async with serving(app) as address:
            _, writer = await asyncio.open_connection(*address)
            writer.write(POST + LIST)
            await asyncio.sleep(0.05)
            writer.close()
            await asyncio.sleep(0.05)
            seen.append("left")
            await until(lambda: len(seen) == 3)

    asyncio.run(run())
    assert seen[:2] == ["left", 1] and isinstance(seen[2], ClientGone)


def test_an_answered_request_leaves_no_cycle_of_objects() -> None:
    async def run() -> int:
        async with serving(echo) as address:
            reader, writer = await asyncio.open_connection(*address)
            gc.collect()
            gc.disable()
            for _ in range(5):
                writer.write(POST + LIST)
                await reader.readuntil(LIST)
            await asyncio.sleep(0.02)
            return sum(type(each) is PlainCycle for each in gc.get_objects())

    try:
        assert asyncio.run(run()) <= 1  # the connection keeps its last one
    finally:
        gc.enable()


class Clock:
    """An event loop without a loop: its time stands still, and its timers are run by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, work: Callable[[], None]) -> Clock:
        self.timers.append((self.now + seconds, work))
        return self

    def run_timer(self) -> None:
        self.now, work = self.timers.pop()
        work()

    def cancel(self) -> None:
        self.timers.clear()


class Transport(asyncio.Transport):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def resume_reading(self) -> None:
        pass


def new_connection() -> tuple[PlainProtocol, Clock, Transport]:
    clock, transport = Clock(), Transport()
    config = uvicorn.Config(echo, access_log=False, log_config=None, timeout_keep_alive=75)
    protocol = PlainProtocol(config=config, server_state=ServerState(), app_state={}, _loop=clock)
    protocol.connection_made(transport)
    return protocol, clock, transport


def test_an_idle_connection_is_closed_by_one_timer_for_all_its_requests() -> None:
    protocol, clock, transport = new_connection()
    for clock.now in (0.0, 30.0, 60.0):
        protocol._unset_keepalive_if_required()
        protocol.on_response_complete()
        assert protocol.is_idle and [due for due, _ in clock.timers] == [75.0]
    clock.run_timer()
    assert not transport.is_closed and [due for due, _ in clock.timers] == [135.0]
    protocol._unset_keepalive_if_required()
    assert not protocol.is_idle
    clock.run_timer()
    assert not transport.is_closed and not clock.timers, "a request is at work"
    clock.now = 200.0
    protocol.on_response_complete()
    clock.run_timer()
    assert transport.is_closed and clock.now == 275.0


def test_a_timer_that_does_not_look_at_the_request_would_close_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainProtocol, "timeout_keep_alive_handler", H11Protocol.timeout_keep_alive_handler)
    protocol, clock, transport = new_connection()
    protocol.on_response_complete()
    protocol._unset_keepalive_if_required()
    clock.run_timer()
    assert transport.is_closed


def test_a_lost_connection_leaves_no_timer() -> None:
    protocol, clock, _ = new_connection()
    protocol.on_response_complete()
    protocol.connection_lost(ConnectionResetError())
    assert not clock.timers

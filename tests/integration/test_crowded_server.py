"""Whole servers whose clients are too many, too slow, or send too much: others are served, and health is right."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

PING = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"
PROMPT = [i % 250 + 1 for i in range(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


def request_bytes(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def connections(server: ServerProcess, count: int, data: bytes) -> list[socket.socket]:
    """Open `count` connections, and send `data` on each."""
    made = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(count)]
    for connection in made:
        connection.sendall(data)
    return made


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.001)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def status_of(connection: socket.socket) -> int:
    connection.settimeout(20)
    return int(connection.recv(1 << 16).split()[1])


def slowest_health(server: ServerProcess, until: Callable[[], bool], least: int = 10) -> float:
    """Call /health again and again, at least `least` times and until `until()`; return the seconds of the slowest."""
    times: list[float] = []
    while len(times) < least or not until():
        started = time.monotonic()
        assert server.http.get("/health").status_code == 200
        times.append(time.monotonic() - started)
        time.sleep(0.01)
    return max(times)


def test_engine_07_more_connections_than_files_leave_health_and_control_alone(folder: Path) -> None:
    server = ServerProcess(folder)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (128, 600))  # it finds them when it starts
    server.wait_ready()
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    clients: list[socket.socket] = []
    try:
        assert server.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        clients += connections(server, 250, request_bytes("/generate", body))  # over the soft limit
        assert server.http.get("/health").status_code == 200
        half_open = connections(server, 250, b"POST /generate HTTP/1.1\r\nhost: localhost\r\n")
        clients += half_open
        wait_for(lambda: sum(map(is_closed, half_open)) > 100)  # those beyond the limit
        assert not any(map(is_closed, half_open[:20]))
        half_open[0].close()
        half_open[20].close()
        time.sleep(0.2)
        server.http = httpx.Client(base_url=server.url, timeout=20.0)  # whose connection is one too many
        assert server.http.get("/health").status_code == 200
        reply = server.http.post("/generate", json=body)
        assert reply.status_code == 503 and "connections" in reply.json()["error"]["message"]
        assert server.http.post("/continue_generation").status_code == 200
        assert [status_of(client) for client in clients[:250]] == [200] * 250
        for client in clients:
            client.close()
        time.sleep(0.2)
        assert server.http.post("/generate", json=body).status_code == 200
    finally:
        server.close()
    assert len(server.stderr()) < 20_000, "the log is not flooded"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, receive_timeout=1.5, max_total_tokens=20000) as server:
        yield server


HALF_OPEN = [
    b"POST /generate HTTP/1.1\r\nhost: loc",
    b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n{",
]


def test_engine_07_half_open_requests_are_closed(server: ServerProcess) -> None:
    fresh = [connections(server, 1, sent)[0] for sent in (b"", *HALF_OPEN)]
    used = connections(server, len(HALF_OPEN), PING)
    for client, sent in zip(used, HALF_OPEN):
        assert status_of(client) == 200
        client.sendall(sent)
    started = time.monotonic()
    time.sleep(1.0)
    assert not any(map(is_closed, fresh + used))
    wait_for(lambda: all(map(is_closed, fresh + used)))
    assert time.monotonic() - started < 10.0
    for client in fresh + used:
        client.close()


def test_engine_07_a_slow_but_steady_body_and_idle_connections_stay(server: ServerProcess) -> None:
    (idle,) = connections(server, 1, PING)
    assert status_of(idle) == 200
    padding = " " * (1 << 20)
    data = request_bytes("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "x": padding})
    (client,) = connections(server, 1, b"")
    for part in range(10):
        client.sendall(data[part * len(data) // 10 : (part + 1) * len(data) // 10])
        time.sleep(0.4)
    assert status_of(client) == 200
    idle.sendall(PING)
    assert status_of(idle) == 200
    for connection in (idle, client):
        connection.close()


def in_background(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_engine_13_health_is_quick_under_a_call_of_8192_samples(server: ServerProcess) -> None:
    params = {"max_new_tokens": 2, "n": 512, "ignore_eos": True}
    replies: list[Any] = []
    body = {"input_ids": [[i, *PROMPT] for i in range(16)], "sampling_params": params}
    thread = in_background(lambda: replies.append(server.http.post("/generate", json=body, timeout=120)))
    deadline = time.monotonic() + 8.0
    worst = slowest_health(server, lambda: bool(replies) or time.monotonic() > deadline)
    server.http.post("/abort_request", json={"abort_all": True})
    thread.join()
    assert replies[0].status_code == 200, replies[0].text
    assert len(replies[0].json()) == 8192
    assert worst < 2.5, worst

"""Connections below HTTP clients: bytes as they are, thousands of sockets, readers that do not read."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tests.abuse.server import Victim


@contextlib.contextmanager
def connections(victim: Victim, number: int, receive_bytes: int | None = None) -> Iterator[list[socket.socket]]:
    """Open `number` connections, and close them at the end."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(number):
            sockets.append(connect(victim, receive_bytes))
        yield sockets
    finally:
        for one in sockets:
            one.close()


def connect(victim: Victim, receive_bytes: int | None = None, timeout: float = 5.0) -> socket.socket:
    """Open a connection; `receive_bytes` is the size of the kernel's buffer for a client that does not read."""
    one = socket.socket()
    if receive_bytes is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    one.settimeout(timeout)
    one.connect(("127.0.0.1", victim.port))
    return one


def request(victim: Victim, path: str, body: Any, headers: Iterable[str] = ()) -> bytes:
    """Encode a whole POST as bytes."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{victim.port}", f"Content-Length: {len(content)}", *headers]
    key = victim.setup.key(is_control=False)
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def send(one: socket.socket, data: bytes) -> bool:
    """Return whether all was sent; a peer that has closed is no error."""
    try:
        one.sendall(data)
        return True
    except OSError:
        return False


def status_of(one: socket.socket, timeout: float) -> int | None:
    """Return the status of the answer; 0: the connection was closed without one; None: nothing came."""
    one.settimeout(timeout)
    try:
        head = one.recv(4096)
    except TimeoutError:
        return None
    except OSError:
        return 0
    parts = head.split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


def closed_within(sockets: list[socket.socket], seconds: float) -> int:
    """Return how many connections the server closes within the time; bytes that come before are discarded."""
    poller = select.poll()
    left = {one.fileno(): one for one in sockets}
    for one in sockets:
        one.setblocking(False)
        poller.register(one, select.POLLIN | select.POLLHUP | select.POLLERR)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        for number, _ in poller.poll(200):
            try:
                if left[number].recv(65536):
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            poller.unregister(number)
            del left[number]
    return len(sockets) - len(left)

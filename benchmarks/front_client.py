"""A client that costs little: sockets that are kept open, and requests that are bytes before the clock starts.

`python -m benchmarks.front_client JSON` keeps a number of requests in flight for some seconds, one on each connection.
It prints a line when the clock starts, and then what it counted.  It checks each answer's status and number of tokens,
and reads no more of it.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from rollout.server.connections import raise_file_limit

WARM_S = 1.0
COUNTING = "counting"
"""The line that is printed when the load runs, and the clock starts."""
CONNECTED_AT_ONCE = 256
DEADLINE_S = 120.0
_RECEIVE_BYTES = 1 << 20


class Load(msgspec.Struct, kw_only=True):
    """A load: `request` is a whole HTTP request, `mark` stands once in each whole answer.

    `end`: the bytes that end an answer without a `content-length`.  `pids`: processes whose CPU time is counted.
    """

    port: int
    in_flight: int
    seconds: float
    request: str
    mark: str
    end: str | None
    pids: list[int]


@dataclass
class Counted:
    """Answers in `seconds`, their bytes, their latencies in seconds, and CPU seconds of each process."""

    answers: int
    num_bytes: int
    seconds: float
    latency_p50: float
    latency_p99: float
    cpu_s: list[float]
    own_cpu_s: float


class _Connection:
    """One connection, on which one request follows the other."""

    def __init__(self, load: Load) -> None:
        self.socket = socket.create_connection(("127.0.0.1", load.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = load.request.encode()
        self._mark = load.mark.encode()
        self._end = None if load.end is None else load.end.encode()
        self._parts: list[bytes] = []
        self._missing = -1  # bytes that have yet to come; -1: not known
        self.sent_at = 0.0

    def ask(self) -> None:
        self._parts, self._missing = [], -1
        self.sent_at = time.perf_counter()
        self.socket.sendall(self._request)

    def receive(self) -> int:
        """Take what has come, and return the bytes of the answer if it is whole, else 0.  Raises `RuntimeError`."""
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise RuntimeError(f"the server closed a connection after {b''.join(self._parts)[-300:]!r}")
        self._parts.append(data)
        if self._end is not None:
            return self._checked() if b"".join(self._parts[-3:]).endswith(self._end) else 0
        if self._missing < 0:
            self._missing = self._size() - sum(map(len, self._parts[:-1]))
        self._missing -= len(data)
        return self._checked() if self._missing == 0 else 0

    def _size(self) -> int:
        head, found, _ = b"".join(self._parts).partition(b"\r\n\r\n")
        if not found:
            raise RuntimeError(f"an answer's headers came in parts: {head!r}")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return len(head) + 4 + int(length)

    def _checked(self) -> int:
        answer = b"".join(self._parts)
        if not answer.startswith(b"HTTP/1.1 200 ") or self._mark not in answer:
            raise RuntimeError(f"an answer is wrong: {answer[:600]!r}")
        return len(answer)


def drive(load: Load) -> Counted:
    """Keep the load's requests in flight, and count the answers.

    The clock starts after `WARM_S`, once there have been as many answers as there are requests in flight.
    """
    poll, connections = select.epoll(), {}
    for number in range(load.in_flight):
        connection = _Connection(load)
        connections[connection.socket.fileno()] = connection
        poll.register(connection.socket.fileno(), select.EPOLLIN)
        if number % CONNECTED_AT_ONCE == CONNECTED_AT_ONCE - 1:
            time.sleep(0.02)  # until the server has accepted them
    for connection in connections.values():
        connection.ask()
    _count(poll, connections, WARM_S, least=load.in_flight)
    print(COUNTING, flush=True)
    cpu, own = [cpu_seconds(pid) for pid in load.pids], time.process_time()
    counted = _count(poll, connections, load.seconds)
    counted.cpu_s = [cpu_seconds(pid) - before for pid, before in zip(load.pids, cpu)]
    counted.own_cpu_s = time.process_time() - own
    for connection in connections.values():
        connection.socket.close()
    return counted


def _count(poll: select.epoll, connections: dict[int, _Connection], seconds: float, least: int = 0) -> Counted:
    """Keep requests in flight for some seconds, and until `least` answers have come."""
    answers = num_bytes = 0
    latencies: list[float] = []
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds or answers < least:
        events = poll.poll(DEADLINE_S)
        if not events:
            raise RuntimeError(f"nothing came for {DEADLINE_S:.0f} s")
        for descriptor, _ in events:
            connection = connections[descriptor]
            size = connection.receive()
            if size:
                answers += 1
                num_bytes += size
                latencies.append(time.perf_counter() - connection.sent_at)
                connection.ask()
    latencies.sort()
    p50, p99 = (latencies[int(len(latencies) * share)] if latencies else float("nan") for share in (0.5, 0.99))
    return Counted(answers, num_bytes, now - began, p50, p99, [], 0.0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    raise_file_limit()
    print(json.dumps(asdict(drive(msgspec.json.decode(sys.argv[1], type=Load)))))


if __name__ == "__main__":
    main()

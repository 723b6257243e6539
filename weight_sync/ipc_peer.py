"""`IpcPeer`: the answering end of a conversation over a Unix socket, with a deadline on every wait.

A REP socket by itself waits for ever, also for a peer that is gone.  A monitor tells when the connection is made and
when it is lost, so a dead peer is noticed at once and a silent one at the deadline.

Knows ZMQ and bytes.  Does not know what is said.
"""

from __future__ import annotations

import re
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.waiting import POLL_S, Patience

CONNECT_S = 10.0

_ENDPOINT = re.compile(r"ipc://[\x21-\x7e]{1,100}")
_LINGER_MS = 1000
_HANDSHAKE = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOST = zmq.EVENT_DISCONNECTED


def check_endpoint(endpoint: str) -> None:
    """Raises `WeightRequestError` for anything but a Unix socket: a call must not make the engine dial out."""
    if not _ENDPOINT.fullmatch(endpoint):
        raise WeightRequestError(f"{endpoint[:200]!r} is not the address of a Unix socket, ipc://PATH")


class IpcPeer:
    """One conversation with whoever listens at `endpoint`, who has `CONNECT_S` to accept it.  Not thread-safe.

    `patience` may end its waits.  Raises `WeightRequestError` (no such kind of address), `TransportError` (nobody
    listens).
    """

    def __init__(
        self, endpoint: str, deadline: float, max_message_bytes: int, patience: Patience | None = None
    ) -> None:
        check_endpoint(endpoint)
        self.deadline = deadline
        self.owes_answer = False
        self._patience = patience or Patience()
        self._endpoint = endpoint
        self._connected = self._lost = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE | _LOST)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._connect()
        except Exception:
            self.close()
            raise

    def receive(self) -> memoryview:
        """The next message.  Raises `TransportError`: nothing came in time, or the peer is gone or sent too much."""
        while True:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                raise TransportError(f"the sender at {self._endpoint} has said nothing until the deadline")
            self._wait(0.0 if self._lost else left_s)
            if self._socket.poll(0):
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self.owes_answer = True
                if len(frames) != 1:
                    raise WeightRequestError(f"a message has {len(frames)} parts")
                return memoryview(frames[0].bytes)
            if self._lost:
                raise TransportError(f"the sender at {self._endpoint} is gone, or sent more than a message may hold")

    def answer(self, text: str = "") -> None:
        """Answer the last message; empty text means that all is well.  A peer that is gone gets nothing."""
        assert self.owes_answer
        self.owes_answer = False
        self._socket.send(text.encode(), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is left, for a second at most, and hang up."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _connect(self) -> None:
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            raise WeightRequestError(f"cannot connect to {self._endpoint}: {error}") from None
        until = min(self.deadline, time.monotonic() + CONNECT_S)
        while not self._connected:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TransportError(f"nobody answers at {self._endpoint}")
            self._wait(left_s)

    def _wait(self, seconds: float) -> None:
        """Until a message or news of the connection, or for a moment; note the news.  Raises as `Patience.check`."""
        self._patience.check()
        ready = dict(self._poller.poll(max(1, int(min(seconds, POLL_S) * 1000))))
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)["event"]
            if event == _HANDSHAKE:
                self._connected = True
            elif self._connected:
                self._lost = True

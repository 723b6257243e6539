"""How messages reach the scheduler and leave it: over ZMQ from another process, or within one process.

Knows bytes, sockets, waiting, and which messages are not to wait.  Does not know what a message means.

Thousands of requests may come at once, and taking in each costs a fraction of a step.  So that control verbs do not
wait for as many steps:

* All messages but `GetState` take effect in the order in which they were sent.  An abort finds every request that was
  sent before it; a pause stops, or aborts, what was sent before it, and nothing that was sent after it.
* Requests and aborts are taken in a bounded number a turn; a verb is taken in the turn in which it comes, with all
  that was sent before it.
* `GetState` only looks, so that its place does not matter: it goes first.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import zmq

from rollout.core.io_struct import (
    AbortReqInput,
    GetStateReqInput,
    SchedulerInput,
    SchedulerOutput,
    TokenizedGenerateReqInput,
    decode_input,
    encode,
)
from rollout.core.message import Message
from rollout.core.sampling_params import SamplingParams

_MOST_AT_ONCE = 64  # messages between two steps: a burst of requests is taken in over several


def _beginning(message: Message) -> bytes:
    """With which bytes messages of this kind begin: the number of fields and the name are the same for all."""
    data, name = encode(message), type(message).__name__.encode()
    return data[: data.index(name) + len(name)]


_LOOKS = _beginning(GetStateReqInput(request_id=""))
_MAY_WAIT = (
    _beginning(TokenizedGenerateReqInput(rid="", input_ids=[], sampling_params=SamplingParams())),
    _beginning(AbortReqInput()),
)


class Channel(Protocol):
    """Inbox and outbox of a scheduler."""

    @property
    def now(self) -> float:
        """Seconds on a monotonic clock; the same on all ranks that share an inbox, until the next `receive`."""

    def receive(self, timeout_ms: int) -> list[SchedulerInput]:
        """Messages that are there, in order; waits up to `timeout_ms` for the first, less if `wake` is called."""

    def send(self, message: SchedulerOutput) -> None: ...

    def wake(self) -> None:
        """End a `receive` that waits.  May be called from any thread."""


class RawChannel(Channel, Protocol):
    """One whose messages can be passed on as they came."""

    def receive_raw(self, timeout_ms: int) -> list[bytes]:
        """As `receive`, not decoded."""


class ZmqChannel:
    """PULL from and PUSH to the main process.  The addresses are `ipc://` paths that the main process bound."""

    def __init__(self, input_addr: str | None, output_addr: str, secret: str | None = None) -> None:
        """`input_addr` None: a rank that gets its messages from another one.  `secret` goes before every message."""
        self._secret = None if secret is None else secret.encode()
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._output = self._context.socket(zmq.PUSH)
        for socket, address in ((self._input, input_addr), (self._output, output_addr)):
            socket.set_hwm(0)
            if address is not None:
                socket.connect(address)
        self._output.setsockopt(zmq.LINGER, 2000)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._input, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._backlog: deque[bytes] = deque()

    @property
    def now(self) -> float:
        return time.monotonic()

    def receive(self, timeout_ms: int) -> list[SchedulerInput]:
        return [decode(data) for data in self.receive_raw(timeout_ms)]

    def receive_raw(self, timeout_ms: int) -> list[bytes]:
        if timeout_ms > 0 and not self._backlog and self._wake_read in dict(self._poller.poll(timeout_ms)):
            os.read(self._wake_read, 4096)
        messages: list[bytes] = []
        count = _MOST_AT_ONCE
        # Asking first costs a fifth of a receive that fails, which is what most steps would see.
        while int(self._input.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            data = self._input.recv(zmq.NOBLOCK)
            if data.startswith(_LOOKS):
                messages.append(data)
                continue
            self._backlog.append(data)
            if not data.startswith(_MAY_WAIT):
                count = max(count, len(self._backlog))
        messages += [self._backlog.popleft() for _ in range(min(count, len(self._backlog)))]
        return messages

    def send(self, message: SchedulerOutput) -> None:
        """Never blocks: the queue to the main process has no limit."""
        data = encode(message)
        if self._secret is not None:
            self._output.send(self._secret, zmq.NOBLOCK | zmq.SNDMORE)
        self._output.send(data, zmq.NOBLOCK)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # as many bytes as fit wait to be read already
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        self._input.close(linger=0)
        self._output.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


class LocalChannel:
    """Both ends in one thread: put into `inbox`, take from `outbox`.  Messages pass through msgpack all the same."""

    def __init__(self) -> None:
        self.inbox: deque[Any] = deque()
        self.outbox: deque[Any] = deque()

    @property
    def now(self) -> float:
        return time.monotonic()

    def receive(self, timeout_ms: int) -> list[SchedulerInput]:
        return [decode(data) for data in self.receive_raw(timeout_ms)]

    def receive_raw(self, timeout_ms: int) -> list[bytes]:
        messages = [encode(message) for message in self.inbox]
        self.inbox.clear()
        return messages

    def send(self, message: SchedulerOutput) -> None:
        self.outbox.append(message)

    def wake(self) -> None:
        """Nothing waits here: the owner drives the scheduler step by step."""


def decode(data: bytes) -> SchedulerInput:
    """The peer is our own main process: a message that does not decode is a bug, and is said so."""
    try:
        return decode_input(data)
    except msgspec.DecodeError as error:
        raise RuntimeError(f"the main process sent a message that does not decode: {error}") from error

"""The channels of the scheduler's messages: over ZMQ from another process, within one process, shared by ranks.

Thousands of requests may come at once, and taking in each costs a fraction of a step.  These rules keep control verbs
from waiting for many steps:

* All messages but `GetState` take effect in the order in which they were sent.  An abort finds every request that was
  sent before it; a pause stops, or aborts, the requests that were sent before it, and no later ones.
* Requests and aborts are taken in a bounded number a turn; a verb is taken in the turn in which it comes, with all
  messages that were sent before it.
* `GetState` only reads, so that its place does not matter: it is handled first.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import torch
import zmq

from rollout.core.errors import FatalError
from rollout.core.messages.io_struct import (
    AbortReqInput,
    BatchTokenOutput,
    GetStateReqInput,
    SchedulerInput,
    SchedulerOutput,
    TokenizedGenerateReqInput,
    encode,
)
from rollout.core.messages.message import Message
from rollout.core.messages.unreadable import Unreadable, encode_output, read_input
from rollout.core.sampling_params import SamplingParams
from rollout.distributed.parallel import Parallel

_MAX_AT_ONCE = 64  # messages between two steps: a burst of requests is taken in over several steps
_OUTPUTS_AT_ONCE = 64  # of a message: the main process decodes a message in one piece
_HEADER = struct.Struct("<dQq")  # of a broadcast: the time, the mark of the served epoch, the bytes that follow
_INLINE_BYTES = 4096  # messages up to this size go with the header


def _parts(message: SchedulerOutput) -> Iterator[SchedulerOutput]:
    """Yield the message, or its outputs in messages of at most `_OUTPUTS_AT_ONCE`."""
    if not isinstance(message, BatchTokenOutput) or len(message.outputs) <= _OUTPUTS_AT_ONCE:
        yield message
        return
    for first in range(0, len(message.outputs), _OUTPUTS_AT_ONCE):
        yield BatchTokenOutput(outputs=message.outputs[first : first + _OUTPUTS_AT_ONCE])


def _beginning(message: Message) -> bytes:
    """Return the bytes that messages of this kind begin with: all have the same number of fields and the same name."""
    data, name = encode(message), type(message).__name__.encode()
    return data[: data.index(name) + len(name)]


_READS = _beginning(GetStateReqInput(request_id=""))
_MAY_WAIT = (
    _beginning(TokenizedGenerateReqInput(rid="", input_ids=[], sampling_params=SamplingParams())),
    _beginning(AbortReqInput()),
)


class Channel(Protocol):
    """Inbox and outbox of a scheduler."""

    @property
    def now(self) -> float:
        """Seconds on a monotonic clock; the same on all ranks that share an inbox, until the next `receive`."""

    def receive(self, timeout_ms: int) -> list[SchedulerInput | Unreadable]:
        """Return the messages that have come, in order.

        Waits up to `timeout_ms` for the first one, less if `wake` is called.  A message that does not decode is an
        `Unreadable` in its place.
        """

    def send(self, message: SchedulerOutput) -> None: ...

    def wake(self) -> None:
        """End a `receive` that waits.  May be called from any thread."""


class RawChannel(Channel, Protocol):
    """The channel of one process; its messages can be passed on to other ranks as they came."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def receive(self, timeout_ms: int) -> list[SchedulerInput | Unreadable]:
        return [read_input(data) for data in self.receive_raw(timeout_ms)]

    def receive_raw(self, timeout_ms: int) -> list[bytes]:
        """Receive as `receive` does, without decoding."""


class ZmqChannel(RawChannel):
    """PULL from and PUSH to the main process.  The addresses are `ipc://` paths that the main process bound."""

    def __init__(self, input_addr: str | None, output_addr: str, secret: str | None = None) -> None:
        """Connect to the main process.

        `input_addr` is None for a rank that gets its messages from another one.  `secret` is sent before every message.
        """
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

    def receive_raw(self, timeout_ms: int) -> list[bytes]:
        if timeout_ms > 0 and not self._backlog and self._wake_read in dict(self._poller.poll(timeout_ms)):
            os.read(self._wake_read, 4096)
        messages: list[bytes] = []
        count = _MAX_AT_ONCE
        # Asking first costs a fifth of a receive that fails.  In most steps no message has come.
        while int(self._input.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            for data in self._input.recv_multipart(zmq.NOBLOCK):  # the messages of one turn of the main process
                if data.startswith(_READS):
                    messages.append(data)
                    continue
                self._backlog.append(data)
                if not data.startswith(_MAY_WAIT):
                    count = max(count, len(self._backlog))
        messages += [self._backlog.popleft() for _ in range(min(count, len(self._backlog)))]
        return messages

    def send(self, message: SchedulerOutput) -> None:
        """Send without blocking: the queue to the main process has no limit."""
        for part in _parts(message):
            data = encode_output(part)
            if self._secret is not None:
                self._output.send(self._secret, zmq.NOBLOCK | zmq.SNDMORE)
            self._output.send(data, zmq.NOBLOCK)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the reader wakes anyway
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        self._input.close(linger=0)
        self._output.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


class LocalChannel(RawChannel):
    """Both ends in one thread: put into `inbox`, take from `outbox`.

    `inbox` takes messages and encoded ones; all pass through msgpack.
    """

    def __init__(self) -> None:
        self.inbox: deque[Any] = deque()
        self.outbox: deque[Any] = deque()

    def receive_raw(self, timeout_ms: int) -> list[bytes]:
        messages = list(self.inbox)
        self.inbox.clear()
        return [message if isinstance(message, bytes) else encode(message) for message in messages]

    def send(self, message: SchedulerOutput) -> None:
        self.outbox.append(message)

    def wake(self) -> None:
        """Do nothing: the owner drives the scheduler step by step, so that no `receive` waits."""


class SharedChannel:
    """One inbox and one clock for all ranks of an engine, over the channel of each rank's own process.

        main ---> tp rank 0 --- one broadcast a turn: time, its epoch's mark, messages ---> the other ranks

    All ranks act on a message in the same turn and in the same order, and have the same time, `now`.  A rank that
    serves another epoch than rank 0 ends the engine before it acts on anything.  Only the first attention-TP rank of
    each data-parallel rank answers.  `serves()` returns the mark of the serving epoch, below 2^64.
    """

    def __init__(self, inner: RawChannel, parallel: Parallel, serves: Callable[[], int]) -> None:
        self._inner = inner
        self._serves = serves
        self._rank = parallel.position.world_rank
        self._tp = parallel.tp
        self._speaks = parallel.position.is_dp_leader
        self._owns_inbox = parallel.position.is_tp_leader
        self._buffer = torch.zeros(_HEADER.size + _INLINE_BYTES, dtype=torch.uint8)
        self._now = inner.now

    @property
    def now(self) -> float:
        return self._now

    def receive(self, timeout_ms: int) -> list[SchedulerInput | Unreadable]:
        """Wait for messages: on rank 0 for its channel, on the other ranks for rank 0.

        Raises `RankLostError`, and `FatalError` if this rank and rank 0 serve different epochs.
        """
        body = b""
        if self._owns_inbox:
            messages = self._inner.receive_raw(timeout_ms)
            body = msgspec.msgpack.encode(messages) if messages else b""
            self._write(_HEADER.pack(self._inner.now, self._serves(), len(body)) + body[:_INLINE_BYTES])
        self._tp.broadcast(self._buffer)
        header = self._buffer[: _HEADER.size].numpy().tobytes()
        self._now, served, size = _HEADER.unpack(header)
        if served != self._serves():
            raise FatalError(
                f"rank {self._rank} serves other weights, or experts in other places, than the first rank of its engine"
            )
        if size == 0:
            return []
        if size > _INLINE_BYTES:
            body = self._share_long(body, size)
        else:
            body = self._buffer[_HEADER.size : _HEADER.size + size].numpy().tobytes()
        return [read_input(data) for data in msgspec.msgpack.decode(body, type=list[bytes])]

    def send(self, message: SchedulerOutput) -> None:
        if self._speaks:
            self._inner.send(message)

    def wake(self) -> None:
        self._inner.wake()

    def _write(self, data: bytes) -> None:
        self._buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _share_long(self, body: bytes, size: int) -> bytes:
        whole = torch.empty(size, dtype=torch.uint8)
        if self._owns_inbox:
            whole.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        self._tp.broadcast(whole)
        return whole.numpy().tobytes()

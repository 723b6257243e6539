"""The sockets between the main process and the schedulers, main's side.

main  PUSH (bind) input0.sock, ...  ->  PULL (connect)  rank 0 of each engine
main  PULL (bind) output.sock       <-  PUSH (connect)  every rank
      and, for ranks on other machines, the same at a TCP port

A message of ZMQ to an engine has one frame for each message of one turn of the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import zmq

from rollout.core.errors import StartupError, Unavailable
from rollout.core.messages.io_struct import BatchTokenOutput, SchedulerInput, SchedulerOutput, TokenizedGenerateReqInput
from rollout.core.messages.message import ControlReqInput
from rollout.core.messages.unreadable import Unreadable, packed, read_output

logger = logging.getLogger(__name__)

# The kernel's limit on the path of a Unix socket, with its closing zero.
_MAX_SOCKET_PATH = 107
_RETRY_S = 0.05
OUTPUTS_AT_ONCE = 16


def in_parts(message: SchedulerOutput | Unreadable) -> Iterator[SchedulerOutput | Unreadable]:
    """Yield the message, or parts of at most `OUTPUTS_AT_ONCE` outputs."""
    if not isinstance(message, BatchTokenOutput) or len(message.outputs) <= OUTPUTS_AT_ONCE:
        yield message
        return
    for first in range(0, len(message.outputs), OUTPUTS_AT_ONCE):
        yield BatchTokenOutput(outputs=message.outputs[first : first + OUTPUTS_AT_ONCE])


class SchedulerLink(Protocol):
    """The part of a channel that the manager needs; in one process `Engine` hands the messages over itself."""

    def send(self, *messages: SchedulerInput) -> None: ...

    async def receive(self) -> SchedulerOutput | Unreadable: ...


class SchedulerChannel:
    """Sockets that main binds, in a folder that only its user can enter.  Use from one event loop.

    `num_inboxes`: engines that take requests of their own.  `remote_host`: an address of this machine at which ranks
    on others reach it; then messages must carry `secret`, which only the ranks have.
    """

    def __init__(self, folder: str | Path, num_inboxes: int = 1, remote_host: str | None = None) -> None:
        """Bind the sockets.  Raises `StartupError` when the path of `folder` is too long for a socket."""
        self.input_addrs = [_address(Path(folder) / f"input{index}.sock") for index in range(num_inboxes)]
        self.output_addr = _address(Path(folder) / "output.sock")
        self.remote_output_addr: str | None = None
        self.secret = None if remote_host is None else secrets.token_hex(16)
        self._context = zmq.Context()
        self._pushes = [self._context.socket(zmq.PUSH) for _ in self.input_addrs]
        self._outboxes = [_Outbox(push) for push in self._pushes]
        self._pull = self._context.socket(zmq.PULL)
        self._inbox = _Inbox(self._pull)
        for socket in (*self._pushes, self._pull):
            for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
                socket.setsockopt(option, 0)
        for push, address in zip(self._pushes, self.input_addrs):
            push.bind(address)
        self._pull.bind(self.output_addr)
        if remote_host is not None:
            port = self._pull.bind_to_random_port(f"tcp://{remote_host}")
            self.remote_output_addr = f"tcp://{remote_host}:{port}"

    def send(self, *messages: SchedulerInput) -> None:
        """Hand each request to its engine, anything else to all, in the order of the calls.

        They leave when the event loop has done what is ready now; a verb leaves at once, with all before it.  Raises
        `BadRequest` if one of them could not be read, and `Unavailable` when an engine is not connected; then none
        leaves.
        """
        posts = [(self._targets(message), packed(message)) for message in messages]
        for targets, _ in posts:
            for outbox in targets:
                outbox.require_connected()
        for targets, data in posts:
            for outbox in targets:
                outbox.add(data)
        if any(isinstance(message, ControlReqInput) for message in messages):
            for outbox in self._outboxes:
                outbox.leave_now()

    def _targets(self, message: SchedulerInput) -> list[_Outbox]:
        if len(self._outboxes) > 1 and isinstance(message, TokenizedGenerateReqInput):
            return [self._outboxes[message.dp_rank]]
        return self._outboxes

    async def receive(self) -> SchedulerOutput | Unreadable:
        """Return the next message; wait without a deadline, as the caller ends with the scheduler process."""
        while True:
            *proof, data = await self._inbox.receive()
            if self.secret is None or hmac.compare_digest(b"".join(proof), self.secret.encode()):
                return read_output(data)
            logger.warning("a message that did not come from a rank of this engine was dropped")

    def close(self) -> None:
        self._inbox.close()
        for outbox in self._outboxes:
            outbox.close()
        for push in self._pushes:
            push.close()
        self._pull.close()
        self._context.term()


class _Outbox:
    """The messages to one engine, which leave together: to wake its process costs more than a message."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._waiting: list[bytes] = []
        self._due: asyncio.Handle | None = None
        self._is_lost = False

    def require_connected(self) -> None:
        """Raise `Unavailable` if no engine would take a message now."""
        if (not self._waiting or self._is_lost) and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            raise Unavailable("the scheduler is not connected")

    def add(self, data: bytes) -> None:
        """Have a message leave after those before it."""
        self._waiting.append(data)
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._leave)

    def leave_now(self) -> None:
        """Send what waits, unless the engine is lost."""
        if self._due is not None and not self._is_lost:
            self._due.cancel()
            self._leave()

    def _leave(self) -> None:
        """Send what waits.  An engine that was lost meanwhile gets it if it comes back."""
        self._due = None
        try:
            self._socket.send_multipart(self._waiting, zmq.NOBLOCK)
        except zmq.Again:
            self._is_lost = True
            self._due = asyncio.get_running_loop().call_later(_RETRY_S, self._leave)
        else:
            self._is_lost = False
            self._waiting = []

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()


class _Inbox:
    """The messages of a socket, for one reader on an event loop.

    `zmq.asyncio` makes futures, callbacks and timers for each message, which take half again as long.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._came: deque[list[bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message; wait for it without a deadline."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._take)
            self._take()
        while not self._came:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._came.popleft()

    def _take(self) -> None:
        """Take all that has come: the descriptor does not tell of it again."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._came.append(self._socket.recv_multipart(zmq.NOBLOCK))
        if self._came and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)


def _address(path: Path) -> str:
    if len(str(path).encode()) > _MAX_SOCKET_PATH:
        raise StartupError(f"the path {path} is too long for a socket; set TMPDIR to a shorter folder")
    return f"ipc://{path}"

"""The two sockets between the main process and the scheduler, main's side.

Knows ZMQ and the byte form of messages.  Does not know what they mean.

    main  PUSH (bind) input.sock  ->  PULL (connect)  scheduler
    main  PULL (bind) output.sock <-  PUSH (connect)  scheduler
"""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.asyncio

from rollout.core.errors import StartupError, Unavailable
from rollout.core.io_struct import SchedulerInput, SchedulerOutput, decode_output, encode

# The kernel's limit on the path of a Unix socket, with its closing zero.
_MAX_SOCKET_PATH = 107


class SchedulerChannel:
    """Both ends bound by main, in a folder that only its user can enter.  Use from one event loop."""

    def __init__(self, folder: str | Path) -> None:
        """Raises `StartupError` when `folder` is too deep for a socket."""
        self.input_addr = _address(Path(folder) / "input.sock")
        self.output_addr = _address(Path(folder) / "output.sock")
        self._context = zmq.asyncio.Context()
        # A plain socket: sending is one synchronous hand-over, so messages leave in the order of the calls.
        self._push: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._push.setsockopt(option, 0)
            self._pull.setsockopt(option, 0)
        self._push.bind(self.input_addr)
        self._pull.bind(self.output_addr)

    def send(self, message: SchedulerInput) -> None:
        """Hand `message` to the scheduler.  Raises `Unavailable` when no scheduler is connected."""
        try:
            self._push.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise Unavailable("the scheduler is not connected") from None

    async def receive(self) -> SchedulerOutput:
        """The next message; waits without a deadline, as the caller ends with the scheduler process.

        Raises `msgspec.ValidationError` for anything that is not a scheduler's message.
        """
        return decode_output(await self._pull.recv())

    def close(self) -> None:
        self._push.close()
        self._pull.close()
        self._context.term()


def _address(path: Path) -> str:
    if len(str(path).encode()) > _MAX_SOCKET_PATH:
        raise StartupError(f"the path {path} is too long for a socket; set TMPDIR to a shorter folder")
    return f"ipc://{path}"

"""A `lockstep serve` of an example's own, started before its work and stopped after it."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from lockstep_rl import Client, LockstepError
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

READY_S = 180.0


@contextlib.contextmanager
def serving(checkpoint: Path, log: Path, threads: int, flags: Sequence[str] = ()) -> Iterator[str]:
    """Serve a checkpoint as weight version 0 and yield the URL.  `flags`: further flags of `lockstep serve`.

    Raises `LockstepError` if the server does not become ready, or ends meanwhile.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "rollout.cli.main", "serve", "--model-path", str(checkpoint), "--port", str(port)),
        *("--weight-version", "0", "--num-threads", str(threads), *flags),
    ]
    with ChildProcess("server", command, log) as server, Client(url) as client:
        deadline = time.monotonic() + READY_S
        while not client.health(timeout=2.0):
            if server.exit_status() is not None or time.monotonic() > deadline:
                raise LockstepError(f"the server did not become ready\n{server.last_words()}")
            time.sleep(0.2)
        try:
            yield url
        except BaseException:
            if server.exit_status() is not None:
                raise LockstepError(f"the server ended\n{server.last_words()}") from None
            raise


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM act like Ctrl-C inside the block, so that every way out ends the server.

    A shell has the jobs that a script starts in the background ignore SIGINT; they end by it here, too.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # an event loop has its own, which cancels the main task
        if not callable(handler):
            raise KeyboardInterrupt
        handler(number, frame)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reason(error: BaseException) -> str:
    """Return the type and text of an error; for a group, of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"

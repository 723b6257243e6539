"""A server that an example starts for itself, and ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout.client import RolloutClient
from rollout.core.errors import LockstepError
from rollout.server.child_process import ChildProcess
from weight_sync.process_group import free_port

READY_S = 120.0


@contextlib.contextmanager
def server(model: Path, threads: int, flags: Sequence[str]) -> Iterator[str]:
    """Start a server of the checkpoint, as weight version 0, and yield its URL.  Its log is `server.log` there.

    Raises `LockstepError` if it does not become ready, or ends inside of the block.
    """
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", model / "server.log"
    command = [
        *(sys.executable, "-m", "rollout.cli.main", "serve", "--model-path", str(model), "--port", str(port)),
        *("--weight-version", "0", "--num-threads", str(threads), *flags),
    ]
    with ChildProcess("server", command, log) as process, RolloutClient(url) as client:
        deadline = time.monotonic() + READY_S
        while not client.health(timeout=2.0):
            if process.exit_status() is not None or time.monotonic() > deadline:
                raise LockstepError(f"the server did not become ready\n{process.last_words()}")
            time.sleep(0.2)
        try:
            yield url
        except BaseException:
            if process.exit_status() is not None:
                raise LockstepError(f"the server ended\n{process.last_words()}") from None
            raise


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C inside the block, so that every way out ends the server."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def reason(error: BaseException) -> str:
    """Return the type and text of an error; for a group, of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"

"""A `lockstep serve` of an example's own, started before its work and stopped after it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

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

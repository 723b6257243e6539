"""The scheduler's process, as its parent sees it.

Knows how to start, watch and end it.  Does not know what it does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence

from rollout.core.server_args import ServerArgs
from rollout.tokenizer_manager.channel import SchedulerChannel

WORKER_COMMAND = (sys.executable, "-m", "rollout.scheduler.worker")
KILL_WAIT_S = 5.0
# How long an idle compute thread spins before it sleeps, about 0.4 ms: enough to bridge the gap between two steps, for
# waking a thread of a virtual machine costs more than a small operator, and little enough that a trainer on the same
# cores is not held up.  OpenMP's own default is milliseconds.
SPIN_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000"}


class SchedulerProcess:
    """A running scheduler.  Its standard output and error are ours."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, args: ServerArgs, channel: SchedulerChannel, command: Sequence[str] = WORKER_COMMAND
    ) -> SchedulerProcess:
        """Start it in a session of its own, so that Ctrl-C reaches only this process, which then ends it in order.

        The command line is visible to other users of the machine, so keys are left out of the settings.
        """
        config = {
            "server_args": args.public_dict(),
            "input_addr": channel.input_addr,
            "output_addr": channel.output_addr,
            "parent_pid": os.getpid(),
        }
        process = await asyncio.create_subprocess_exec(
            *command,
            "--config",
            json.dumps(config),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=SPIN_ENVIRONMENT | os.environ,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        return await self._process.wait()

    async def end(self, timeout_s: float) -> int:
        """Wait `timeout_s` seconds for it to end by itself, then kill it.  The exit status."""
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await asyncio.wait_for(self._process.wait(), KILL_WAIT_S)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


def describe_exit(status: int) -> str:
    """`exit status 1`, or the name of the signal that ended it."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"

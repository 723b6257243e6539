"""The schedulers' processes, one for each rank on this machine, as their parent sees them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.core.args.server_args import ServerArgs
from rollout.core.console import fail, say
from rollout.core.messages.message import CHANNEL_SECRET
from rollout.distributed.layout import ParallelLayout
from rollout.tokenizer_manager.channel import SchedulerChannel

WORKER_COMMAND = (sys.executable, "-m", "rollout.engine.worker")
KILL_WAIT_S = 5.0
_OTHERS_END_S = 5.0
# How long torch's own threads, which copy and check weights next to the steps, look for work before they sleep: some 40
# microseconds instead of OpenMP's milliseconds, in which they would hold a core.  Threads of our
# operators find out themselves (`patience.h`).
SPIN_ENVIRONMENT = {"GOMP_SPINCOUNT": "2000"}


class SchedulerProcesses:
    """The running ranks of this machine.  Their standard output and error are ours."""

    def __init__(self, processes: dict[int, asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @classmethod
    async def start(
        cls,
        args: ServerArgs,
        layout: ParallelLayout,
        channel: SchedulerChannel | None,
        folder: Path,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> SchedulerProcesses:
        """Start the ranks of `args.node_rank`; `channel` is None on a machine that does not serve HTTP.

        Each is in a session of its own, so that Ctrl-C reaches only this process, which then ends them in order.
        """
        ranks_here = layout.world_size // args.nnodes
        first = args.node_rank * ranks_here
        processes: dict[int, asyncio.subprocess.Process] = {}
        try:
            for rank in range(first, first + ranks_here):
                config = _config(args, layout, channel, folder, rank)
                processes[rank] = await asyncio.create_subprocess_exec(
                    *command,
                    "--config",
                    json.dumps(config),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env=SPIN_ENVIRONMENT | os.environ | _secret(channel),
                )
        except BaseException:
            cls(processes).kill()
            raise
        return cls(processes)

    async def first_end(self) -> str:
        """Wait until one of the ranks ends, and return in words which one and how."""
        ends = {rank: asyncio.create_task(process.wait()) for rank, process in self._processes.items()}
        try:
            await asyncio.wait(ends.values(), return_when=asyncio.FIRST_COMPLETED)
            ended = {rank: task.result() for rank, task in ends.items() if task.done()}
        finally:
            for task in ends.values():
                task.cancel()
        # One that was killed took the others with it.
        rank = min(ended, key=lambda rank: (ended[rank] >= 0, rank))
        return f"the {self._name(rank)} ended{{when}}: {describe_exit(ended[rank])}"

    async def end(self, timeout_s: float) -> list[int]:
        """Wait `timeout_s` seconds for all to end by themselves, kill the rest, and return the exit statuses."""
        waits = [process.wait() for process in self._processes.values()]
        try:
            return await asyncio.wait_for(asyncio.gather(*waits), timeout_s)
        except TimeoutError:
            self.kill()
            waits = [process.wait() for process in self._processes.values()]
            return await asyncio.wait_for(asyncio.gather(*waits), KILL_WAIT_S)

    def kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                # `process.kill` would collect one that has just ended, before its watcher can learn of its status.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def _name(self, rank: int) -> str:
        return "scheduler process" if len(self._processes) == 1 else f"scheduler process of rank {rank}"


async def run_follower(args: ServerArgs, layout: ParallelLayout, folder: Path, worker_command: Sequence[str]) -> int:
    """Run the ranks of a machine with `--node-rank` above 0: its engine's HTTP server is on machine 0.

    Returns the exit status, 0 after an orderly shutdown.  The ranks end with the engine; a signal here ends the engine.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ranks = await SchedulerProcesses.start(args, layout, None, folder, worker_command)
    say(f"running ranks of the engine at {args.dist_init_addr} (machine {args.node_rank} of {args.nnodes})")
    ended, stopped = asyncio.create_task(ranks.first_end()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not ended.done():
            ended.cancel()
        statuses = await ranks.end(0.0 if stop.is_set() else _OTHERS_END_S)
    if stop.is_set():
        say("stopped by a signal; the engine ends with its ranks")
        return 1
    if any(statuses):
        return fail(ended.result().format(when=""))
    return 0


def _config(
    args: ServerArgs, layout: ParallelLayout, channel: SchedulerChannel | None, folder: Path, rank: int
) -> dict[str, Any]:
    """Return the settings of a rank for its command line, without keys: other users of the machine can read it."""
    place = layout.position(rank)
    return {
        "server_args": args.public_dict(),
        "rank": rank,
        "rendezvous": str(folder / "ranks") if args.nnodes == 1 else f"tcp://{args.dist_init_addr}",
        "input_addr": channel.input_addrs[place.replica] if channel is not None and place.is_tp_leader else None,
        "output_addr": None if channel is None else channel.output_addr,
        "remote_output_addr": None if channel is None else channel.remote_output_addr,
        "parent_pid": os.getpid(),
    }


def _secret(channel: SchedulerChannel | None) -> dict[str, str]:
    """Return the channel's secret as an environment variable, because other users can read the command line."""
    return {} if channel is None or channel.secret is None else {CHANNEL_SECRET: channel.secret}


def describe_exit(status: int) -> str:
    """Describe the end of a process: `exit status 1`, or the name of the signal that ended it."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"

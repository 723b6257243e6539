"""A machine with `--node-rank` above 0: it runs ranks of an engine whose HTTP server is on machine 0.

Knows when its ranks start and end.  They end with the engine; a signal here ends the engine.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from rollout.core.console import say
from rollout.core.server_args import ServerArgs
from rollout.distributed.layout import ParallelLayout
from rollout.entrypoints.scheduler_process import SchedulerProcesses

_OTHERS_END_S = 5.0


async def run_follower(args: ServerArgs, layout: ParallelLayout, folder: Path, worker_command: Sequence[str]) -> int:
    """Run the ranks of this machine until the engine ends; the exit status, 0 after an orderly shutdown."""
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
        say("error: " + ended.result().format(when=""))
        return 1
    return 0

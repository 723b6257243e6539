"""Entry of the scheduler process: `python -m rollout.scheduler.worker --config JSON`.

Reads its settings from the command line, says when it is ready or why it cannot be, and ends when it is told to, when
its parent is gone, or with an error that the parent gets to see.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
import traceback

import torch

from rollout.core.errors import LockstepError
from rollout.core.io_struct import SchedulerFailed
from rollout.core.server_args import ServerArgs
from rollout.scheduler.build import build_scheduler
from rollout.scheduler.channel import ZmqChannel

PROGRESS_EVERY_S = 2.0


def main() -> int:
    """Exit status 0 after an orderly shutdown, 1 after an error, 2 when the parent died."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    config = json.loads(parser.parse_args().config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    channel = ZmqChannel(config["input_addr"], config["output_addr"])
    try:
        status = _serve(ServerArgs(**config["server_args"]), channel, config["parent_pid"])
    except LockstepError as error:
        channel.send(SchedulerFailed(message=str(error)))
        status = 1
    except Exception as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr)
        channel.send(SchedulerFailed(message=f"{type(error).__name__}: {error}", traceback=text))
        status = 1
    channel.close()
    return status


class _LoadProgress:
    """A line every few seconds while weights are read; a load that is done before says nothing."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next += PROGRESS_EVERY_S
            print(f"lockstep: read {done / 1e9:.1f} of {total / 1e9:.1f} GB of weights", file=sys.stderr, flush=True)


def _serve(args: ServerArgs, channel: ZmqChannel, parent_pid: int) -> int:
    scheduler, ready = build_scheduler(args, channel, _LoadProgress())
    channel.send(ready)
    # Modules and the model stay to the end: no collection between two steps need look at them.
    gc.collect()
    gc.freeze()
    with torch.inference_mode():
        while not scheduler.stopped:
            if os.getppid() != parent_pid:
                return 2
            scheduler.tick()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a weight receive may still block the I/O thread; nothing else is left to clean up

"""Entry of the process of one rank: `python -m rollout.engine.worker --config JSON`.

It reads its settings from the command line, joins the other ranks, and reports that it is ready or why it cannot be.
It ends at a shutdown, when its parent or another rank has ended, or with an error that it reports to the parent.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
from functools import partial
from typing import Any

import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.console import LOG_FORMAT, TIME_FORMAT, say
from rollout.core.errors import LockstepError
from rollout.core.messages.io_struct import SchedulerFailed
from rollout.core.messages.message import CHANNEL_SECRET
from rollout.distributed.communicator import RankLostError
from rollout.distributed.layout import layout_of
from rollout.distributed.nccl import nccl_transport
from rollout.distributed.parallel import COLLECTIVE_TIMEOUT_S, Parallel, join
from rollout.distributed.peer_memory import connect_peers
from rollout.engine.build import build_scheduler
from rollout.engine.device import claim_device, with_device
from rollout.engine.rendezvous import check_in, open_store
from rollout.grammar.library import installed_version
from rollout.scheduler.channel import ZmqChannel

PROGRESS_EVERY_S = 2.0
COLLECT_AFTER = 10_000
"""Growth of the number of objects after which Python looks for cycles among the new ones.

With Python's 700, a dozen requests cause a search, and all searches took 2 % of the time of small models.
"""
CONSEQUENCE_WAIT_S = 2.0  # before a rank reports that another ended: the root cause is reported first
_OUTPUT_KEY = "output_addr"
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the rank and return its exit status: 0 after an orderly shutdown, 1 after an error, 2 if the parent died."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    config = json.loads(parser.parse_args().config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    if not _die_with_parent(config["parent_pid"]):
        return 2
    args = with_device(ServerArgs(**config["server_args"]))
    if args.log_level == "debug":
        logging.basicConfig(level="DEBUG", format=LOG_FORMAT, datefmt=TIME_FORMAT, stream=sys.stderr)
    try:
        parallel, output_addr, secret = _join(args, config)
    except LockstepError as error:
        _report(config, error)
        return 1
    channel = ZmqChannel(config["input_addr"], output_addr, secret)
    try:
        status = _serve(args, channel, config["parent_pid"], parallel)
    except RankLostError as error:
        time.sleep(CONSEQUENCE_WAIT_S)
        channel.send(SchedulerFailed(message=str(error)))
        status = 1
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


def _report(config: dict[str, Any], error: LockstepError) -> None:
    """Report an error to the main process if it is on this machine, else to stderr."""
    if config["output_addr"] is None:
        say(f"rank {config['rank']}: {error}", "ERROR")
        return
    channel = ZmqChannel(None, config["output_addr"], os.environ.get(CHANNEL_SECRET))
    channel.send(SchedulerFailed(message=str(error)))
    channel.close()


def _die_with_parent(parent_pid: int) -> bool:
    """End at once when the parent ends, if the system offers it, also while waiting for other ranks.

    Return False if the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid


class _LoadProgress:
    """Logs a line every few seconds while weights are read; a short load has none."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next += PROGRESS_EVERY_S
            say(f"read {done / 1e9:.1f} of {total / 1e9:.1f} GB of weights")


def _join(args: ServerArgs, config: dict[str, Any]) -> tuple[Parallel, str, str | None]:
    """Join the other ranks.  Returns this rank's groups, and the address and the secret for its messages.

    Raises `StartupError`.
    """
    layout, rank = layout_of(args), config["rank"]
    device = claim_device(args, rank)
    if layout.world_size == 1:
        return Parallel(), config["output_addr"], None
    store = open_store(config["rendezvous"], rank, layout.world_size)
    check_in(store, args, rank, installed_version())
    output_addr, secret = config["output_addr"], os.environ.get(CHANNEL_SECRET)
    if rank == 0 and secret is not None:
        store.set(_OUTPUT_KEY, f"{config['remote_output_addr']} {secret}")
    if output_addr is None:
        output_addr, secret = store.get(_OUTPUT_KEY).decode().split()
    weight_timeout_s = 2 * args.weight_update_timeout + COLLECTIVE_TIMEOUT_S
    parallel = join(
        layout,
        rank,
        store,
        weight_timeout_s=weight_timeout_s,
        loopback=args.nnodes == 1,
        device_transport=partial(nccl_transport, device=device) if device.type == "cuda" else None,
        connect_peers=partial(connect_peers, device=device) if _may_share_memory(args, device) else None,
    )
    if rank == 0 and secret is not None:
        store.delete_key(_OUTPUT_KEY)  # all have read it
    return parallel, output_addr, secret


def _may_share_memory(args: ServerArgs, device: torch.device) -> bool:
    """Return whether ranks may sum in memory of one another's devices, which all are on one machine then.

    The sum is a Triton kernel, which `--disable-native-kernels` rules out, too.
    """
    if args.disable_custom_all_reduce or args.disable_native_kernels:
        return False
    return device.type == "cuda" and args.nnodes == 1


def _serve(args: ServerArgs, channel: ZmqChannel, parent_pid: int, parallel: Parallel) -> int:
    progress = _LoadProgress() if parallel.position.world_rank == 0 else None
    scheduler, ready = build_scheduler(args, channel, progress, parallel)
    if parallel.position.is_dp_leader:
        channel.send(ready)
    # Modules and the model live until the end: garbage collections between steps need not visit them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    with torch.inference_mode():
        while not scheduler.serving.is_stopped:
            if os.getppid() != parent_pid:
                return 2
            scheduler.tick()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a weight receive may still block the I/O thread; nothing else is left to clean up

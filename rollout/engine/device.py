"""The device of a rank.

--device auto                      $LOCKSTEP_DEVICE, or cuda where torch finds a GPU, or cpu
--device cpu                       every rank in host memory
--device cuda [--base-gpu-id B]    rank r of a machine on CUDA device B + r, counted as CUDA_VISIBLE_DEVICES shows them
--device cuda:I                    one rank, on CUDA device I
"""

from __future__ import annotations

import dataclasses
import logging
import os

import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.distributed.layout import layout_of

logger = logging.getLogger(__name__)

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_USUAL_QUEUES = 8
"""The queues of a process on a device, where the variable is not set."""


def with_device(args: ServerArgs) -> ServerArgs:
    """Return settings whose device is not `auto`."""
    if args.device != "auto":
        return args
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return dataclasses.replace(args, device=os.environ.get("LOCKSTEP_DEVICE") or found)


def claim_device(args: ServerArgs, world_rank: int) -> torch.device:
    """Make the rank's device current for this process and return it.

    It is also the device of tensors that this thread makes on "cuda" without an index.  Called before anything else
    touches a device, as CUDA sets up the first device that is used.  If one rank of a machine has no device, all its
    ranks raise the same `StartupError`.
    """
    device = rank_device(args, world_rank)
    if device.type == "cuda":
        _warn_of_few_queues()
        torch.cuda.set_device(device)
    return device


def _warn_of_few_queues() -> None:
    """Warn where the driver has fewer queues than streams: then what is on one stream waits for another's.

    Megatron sets the variable to 1 for its own kernels, and Ray hands it on to an engine that a trainer starts.
    """
    stated = os.environ.get(_QUEUES, "")
    if stated.isdecimal() and 0 < int(stated) < _USUAL_QUEUES:
        logger.warning(
            "%s=%s: steps, staged weights and broadcasts wait for each other, and engines of several ranks may stop. "
            "Start the engine without this variable: env -u %s lockstep serve ...",
            _QUEUES,
            stated,
            _QUEUES,
        )


def rank_device(args: ServerArgs, world_rank: int) -> torch.device:
    """Return the device of a rank.  Raises `StartupError` in one line."""
    try:
        asked = torch.device(args.device)
    except RuntimeError as error:
        raise StartupError(f"--device {args.device}: {str(error).splitlines()[0]}") from None
    if asked.type != "cuda":
        return asked
    ranks_here = layout_of(args).world_size // args.nnodes
    if asked.index is not None and ranks_here > 1:
        raise StartupError(
            f"--device {asked} is one device for {ranks_here} ranks: give --device cuda --base-gpu-id {asked.index}"
        )
    first = args.base_gpu_id if asked.index is None else asked.index
    _require_cuda(args.device)
    last, visible = first + ranks_here - 1, torch.cuda.device_count()
    if last >= visible:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown})"
        wanted = f"{ranks_here} ranks from device {first} on need" if ranks_here > 1 else "this rank needs"
        raise StartupError(f"{wanted} CUDA device {last}, and this machine shows {visible} of them{limit}")
    return torch.device("cuda", first + world_rank % ranks_here)


def _require_cuda(asked: str) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        raise StartupError(f"--device {asked}: this torch, {torch.__version__}, is built without CUDA")
    if not torch.cuda.is_available():
        raise StartupError(f"--device {asked}: torch finds no CUDA device here (no driver, or none visible)")

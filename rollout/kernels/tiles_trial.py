"""The trial of matrix tiles, in a process of its own: see `rollout.kernels.isa.tiles_refusal`."""

from __future__ import annotations

import sys

import torch

from rollout.kernels import isa


def try_tiles(library: str) -> int:
    """Return the exit status: 0 if tiles of this processor compute the same bits as their emulation."""
    if not isa.request_tiles():
        print("Linux does not let this process use tile registers", file=sys.stderr)
        return 1
    torch.ops.load_library(library)
    if not torch.ops.lockstep.tiles_agree():
        print("their results differ from Intel's description", file=sys.stderr)
        return 2
    return 0

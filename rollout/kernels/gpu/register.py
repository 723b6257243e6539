"""Puts the Triton kernels of this package into torch's registry, for CUDA tensors.

Triton is not loaded before `load_gpu_kernels` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rollout.kernels.build import KernelStatus
from rollout.kernels.operators import OPERATORS

# The operators with a module and a function of their name in this package.  The others are plain torch on CUDA:
# `gather_rows` and `matrix_rows` are library calls, and so is `linear` of plain weights.
TRITON_OPERATORS = tuple(name for name in OPERATORS if (Path(__file__).parent / f"{name}.py").is_file())
_LARGEST_TILE_BYTES = 144 << 10  # bytes of shared memory for the tiles of experts: `experts_plan.EXPERT_TILES`


@cache
def load_gpu_kernels() -> KernelStatus:
    """Register the Triton kernels under the dispatch key CUDA, once per process.

    It never raises: without triton the caller goes on with plain torch.
    """
    if find_spec("triton") is None:
        return KernelStatus(available=False, reason="triton is not installed: pip install triton")
    if (reason := _too_small()) is not None:
        return KernelStatus(available=False, reason=reason)
    try:
        operators = {name: triton_form(name) for name in TRITON_OPERATORS}
    except ImportError as error:
        return KernelStatus(available=False, reason=f"triton cannot be used: {error}")
    for name, operator in operators.items():
        OPERATORS[name].implement(operator, "CUDA")
    return KernelStatus(available=True)


def _too_small() -> str | None:
    """Return why the CUDA device cannot run the kernels; None if it can, or if there is no device."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    room = getattr(found, "shared_memory_per_block_optin", _LARGEST_TILE_BYTES)
    if room >= _LARGEST_TILE_BYTES:
        return None
    return f"{found.name} has {room >> 10} KiB of shared memory for a block, the tiles of experts take 144"


def triton_form(name: str) -> Callable[..., Any]:
    """Return the function of one of `TRITON_OPERATORS`.  Raises `ImportError` where triton cannot be used."""
    found: Callable[..., Any] = getattr(import_module(f"rollout.kernels.gpu.{name}"), name)
    return found

"""Puts the Triton kernels of this package into torch's registry, for CUDA tensors.

Nothing of triton is loaded before `load_gpu_kernels` is called.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from rollout.kernels.build import KernelStatus
from rollout.kernels.schemas import SCHEMAS

# Operator of `schemas` -> the module of this package that has it.  The others are plain torch on CUDA: `linear`,
# `gather_rows`, `matrix_rows`, `latent_query_store` and `latent_values` are library calls, `gated_delta` is slow.
TRITON_OPERATORS = {
    "add_rms_norm": "norm",
    "norm_linear": "norm",
    "norm_route": "router",
    "qk_norm_rope_store": "rotary",
    "silu_and_mul": "activation",
    "sigmoid_gate": "activation",
    "fused_experts": "experts",
}
# Operators that a CUDA graph can hold: they read no tensor's value on the host, and their sizes follow from the sizes
# of their arguments.  The plain `gated_delta` goes over the lengths of sequences on the host.
GRAPH_SAFE = frozenset(SCHEMAS) - {"gated_delta"}

_LARGEST_TILE_BYTES = 144 << 10  # of shared memory, that of experts: `experts_plan.EXPERT_TILES`

_LIBRARY = torch.library.Library("lockstep", "IMPL")


@cache
def load_gpu_kernels() -> KernelStatus:
    """Register the Triton kernels under the dispatch key CUDA.  Once per process; never raises: without triton the
    caller goes on with plain torch."""
    if find_spec("triton") is None:
        return KernelStatus(available=False, reason="triton is not installed: pip install triton")
    if (reason := _too_small()) is not None:
        return KernelStatus(available=False, reason=reason)
    try:
        operators = {name: getattr(_module(module), name) for name, module in TRITON_OPERATORS.items()}
    except ImportError as error:
        return KernelStatus(available=False, reason=f"triton cannot be used: {error}")
    for name, operator in operators.items():
        _LIBRARY.impl(name, operator, "CUDA")
    return KernelStatus(available=True)


def _too_small() -> str | None:
    """Why a device here, if there is one, cannot run the kernels."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    room = getattr(found, "shared_memory_per_block_optin", _LARGEST_TILE_BYTES)
    if room >= _LARGEST_TILE_BYTES:
        return None
    return f"{found.name} has {room >> 10} KiB of shared memory for a block, the tiles of experts take 144"


def _module(name: str) -> object:
    return import_module(f"rollout.kernels.gpu.{name}")

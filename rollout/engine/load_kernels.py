"""Loads the kernels for the engine's device, and logs the result."""

from __future__ import annotations

import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.console import say
from rollout.core.errors import StartupError
from rollout.kernels.build import KernelStatus, load_kernels
from rollout.kernels.gpu.register import TRITON_OPERATORS, load_gpu_kernels

_PLAIN_TORCH = (
    "running on plain torch, several times slower in decoding and not batch invariant: {reason}. "
    "Run `lockstep build-kernels` once there is a C++20 compiler (Debian: apt install g++)"
)


def load_kernels_of(args: ServerArgs, device: torch.device) -> KernelStatus:
    """Load the device's kernels unless a flag switches them off, and log a line that names the result."""
    if args.disable_native_kernels:
        return KernelStatus(available=False, reason="--disable-native-kernels")
    if device.type == "cuda":
        status = load_gpu_kernels()
        triton = f"Triton kernels for {', '.join(TRITON_OPERATORS)} and sampling; torch for the rest"
        plain = f"running on plain torch, several times slower: {status.reason}"
        say(triton) if status.available else say(plain, "WARNING")
        return status
    if device.type != "cpu":
        return KernelStatus(available=False, reason=f"no compiled operators for device {device.type}")
    isa = None if args.cpu_isa == "auto" else args.cpu_isa
    status = load_kernels(say, isa)
    if isa is not None and not status.available:
        raise StartupError(f"--cpu-isa {isa}: {status.reason}")
    if not status.available:
        say(_PLAIN_TORCH.format(reason=status.reason), "WARNING")
    return status

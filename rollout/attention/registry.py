"""Attention backends by name.  A backend is a file and a line here; its module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

import torch

from rollout.attention.base import AttentionBackend, KVStore
from rollout.attention.native_cpu import supports
from rollout.core.errors import StartupError

# name -> (module, class); the class takes the KV store.
ATTENTION_BACKENDS = {
    "torch_native": ("rollout.attention.torch_native", "TorchNativeBackend"),
    "native_cpu": ("rollout.attention.native_cpu", "NativeCpuBackend"),
}


def choose_attention_backend(dtype: torch.dtype, device: torch.device, head_dim: int, kernels_available: bool) -> str:
    """The fastest backend for KV of this kind."""
    return "native_cpu" if kernels_available and supports(dtype, device, head_dim) else "torch_native"


def create_attention_backend(name: str, kv: KVStore) -> AttentionBackend:
    """Raises `StartupError` for a name that is not registered."""
    if name not in ATTENTION_BACKENDS:
        raise StartupError(f"attention backend {name!r} is not known; choose from {', '.join(ATTENTION_BACKENDS)}")
    module, class_name = ATTENTION_BACKENDS[name]
    return getattr(import_module(module), class_name)(kv)

"""Attention backends by name.  A backend is a file and a line here; its module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from rollout.attention.base import AttentionBackend, KVStore
from rollout.core.errors import StartupError

# name -> (module, class); the class takes the KV store.
ATTENTION_BACKENDS = {
    "torch_native": ("rollout.attention.torch_native", "TorchNativeBackend"),
}


def create_attention_backend(name: str, kv: KVStore) -> AttentionBackend:
    """Raises `StartupError` for a name that is not registered."""
    if name not in ATTENTION_BACKENDS:
        raise StartupError(f"attention backend {name!r} is not known; choose from {', '.join(ATTENTION_BACKENDS)}")
    module, class_name = ATTENTION_BACKENDS[name]
    return getattr(import_module(module), class_name)(kv)

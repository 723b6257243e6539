"""Attention backends by name, the fastest first.  A backend is a file and a line here."""

from __future__ import annotations

from importlib import import_module

from rollout.attention.base import AttentionBackend
from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator
from rollout.memory.kv_pool import KVPool

# --attention-backend -> (module, class); a module is imported when its backend is asked for.
ATTENTION_BACKENDS = {
    "native_cpu": ("rollout.attention.native_cpu", "NativeCpuBackend"),
    "flashinfer": ("rollout.attention.flashinfer", "FlashInferBackend"),
    "torch_native": ("rollout.attention.torch_native", "TorchNativeBackend"),
    "flashinfer_expanded": ("rollout.attention.flashinfer_expanded", "FlashInferExpandedBackend"),
    "fixed_splits": ("rollout.attention.fixed_splits", "FixedSplitsBackend"),
}


def create_attention_backend(
    name: str,
    kv: KVPool,
    kernels_available: bool = True,
    ranks: Communicator | None = None,
) -> AttentionBackend:
    """Create the backend that `find_attention_backend` finds.

    `ranks`: all of the engine, which create a backend together; None: there is one.
    """
    made = find_attention_backend(name, kv, kernels_available)(kv)
    made.settle((lambda mine: mine) if ranks is None else ranks.all_agree)
    return made


def find_attention_backend(name: str, kv: KVPool, kernels_available: bool = True) -> type[AttentionBackend]:
    """Return the backend of this name, or, for "auto", the first that can attend to `kv`.

    Raises `StartupError` for a name that is not registered, or a backend that does not fit.
    """
    names = list(ATTENTION_BACKENDS) if name == "auto" else [name]
    obstacle: str | None = f"it is not known; choose from {', '.join(ATTENTION_BACKENDS)}"
    for candidate in names:
        if candidate in ATTENTION_BACKENDS:
            module, class_name = ATTENTION_BACKENDS[candidate]
            backend: type[AttentionBackend] = getattr(import_module(module), class_name)
            obstacle = backend.obstacle(kv, kernels_available)
            if obstacle is None:
                return backend
    raise StartupError(f"--attention-backend {name}: {obstacle}")

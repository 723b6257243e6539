"""The stand-in's signatures compared with an installed flashinfer's: names, kinds and defaults of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tests.flashinfer_stand_in import stand_in

# Where the package hides what `plan` takes behind **kwargs, the method that names them is compared, too.
METHODS = {
    "BatchDecodeWithPagedKVCacheWrapper": ("__init__", "plan", "_plan_impl", "run", "reset_workspace_buffer"),
    "BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run", "reset_workspace_buffer"),
    "BatchMLAPagedAttentionWrapper": ("__init__", "plan", "run"),
    "BatchPrefillWithRaggedKVCacheWrapper": ("__init__", "plan", "run"),
}

FUNCTIONS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "MLAPlanMetadata.csr": lambda library: library.mla.MLAPlanMetadata.csr,
    "determine_attention_backend": lambda library: library.utils.determine_attention_backend,
    "gen_batch_prefill_module": lambda library: library.jit.gen_batch_prefill_module,
    "merge_state_in_place": lambda library: library.merge_state_in_place,
}


def differences(library: Any) -> list[str]:
    """List every method whose signature differs from the stand-in's; an empty list if all are the same.

    `library`: the module that `import flashinfer` gives; none of its functions is called.
    """
    ours = stand_in()
    found = []
    for class_name, methods in METHODS.items():
        for method in methods:
            pair = (getattr(getattr(x, class_name), method) for x in (ours, library))
            found += _differences(f"{class_name}.{method}", *map(_parameters, pair))
    for name, of in FUNCTIONS.items():
        pair = (of(x) for x in (ours, library))
        found += _differences(name, *map(_parameters, pair))
    return found


def _parameters(function: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, str(p.kind), p.default) for p in parameters if p.name not in ("self", "cls")]


def _differences(name: str, ours: list[tuple[str, str, Any]], theirs: list[tuple[str, str, Any]]) -> list[str]:
    return [] if ours == theirs else [f"{name}: the stand-in has {ours}, the package {theirs}"]

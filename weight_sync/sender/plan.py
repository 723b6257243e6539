"""What a refresh sends: tensors by checkpoint name, each a part of one of the trainer's tensors.

Reads models and state dicts, whole or sharded (DTensor), without copying anything: the cast to the engine's dtype
happens when a bucket is made.

Shapes: E logical experts, I expert width, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weight_sync.errors import WeightRequestError
from weight_sync.tensor_meta import TensorMeta

NamedTensors = list[tuple[str, torch.Tensor]]
TensorSource = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Index = tuple[int | slice, ...]

_COMPILED = "_orig_mod."  # torch.compile's addition to names


@dataclass(frozen=True)
class Part:
    """One tensor to send: `source[index]`, cast to `meta.dtype`.  Index `()` is the whole."""

    meta: TensorMeta
    source: str
    index: Index = ()

    @property
    def is_fused(self) -> bool:
        """A fused expert tensor that goes as it is: the engine splits it, so it has no fingerprint of its own."""
        return _is_fused(self.meta.name)


@dataclass(frozen=True)
class TensorPlan:
    """The trainer's tensors by name, and the parts of them that are sent, by name."""

    sources: dict[str, torch.Tensor]
    parts: dict[str, Part]

    @property
    def metas(self) -> list[TensorMeta]:
        return [part.meta for part in self.parts.values()]


def plan_tensors(source: TensorSource, dtype: torch.dtype | None = None, split_experts: bool = True) -> TensorPlan:
    """`source`: a model, its state dict, or (name, tensor) pairs; of the first two, tied tensors are sent once.

    `dtype`: what floating-point tensors are sent as; None: as they are.  `split_experts`: see `split_fused_experts`.
    Raises `WeightRequestError` for a name given twice, or a fused expert tensor that cannot be split.
    """
    named = named_tensors_of(source) if isinstance(source, torch.nn.Module | Mapping) else source
    sources: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if name in sources:
            raise WeightRequestError(f"{name} is given twice")
        sources[name] = tensor.detach()
    parts: dict[str, Part] = {}
    for name, tensor in sources.items():
        sent_as = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        for part_name, index, shape in _split(name, tuple(tensor.shape)) if split_experts else [(name, (), None)]:
            if part_name in parts:
                raise WeightRequestError(f"{part_name} is given twice")
            meta = TensorMeta(part_name, sent_as, tuple(tensor.shape) if shape is None else shape)
            parts[part_name] = Part(meta, name, index)
    return TensorPlan(sources, parts)


def named_tensors_of(
    source: torch.nn.Module | Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> NamedTensors:
    """The tensors of a model or state dict by checkpoint name, each content once.

    Of tensors that share their memory (tied embeddings) only the first is kept.  `dtype`: the engine's; floating-point
    tensors are cast to it, which copies them; without it the tensors are the model's own.
    """
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    named: NamedTensors = []
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        key = _place(tensor)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        cast = dtype is not None and tensor.is_floating_point()
        named.append((name.replace(_COMPILED, ""), tensor.detach().to(dtype) if cast else tensor.detach()))
    return named


def split_fused_experts(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    """Fused expert tensors of transformers 5 as per-expert checkpoint tensors; everything else as it is.

    `*.experts.gate_up_proj` [E, 2I, D] gives `*.experts.{e}.gate_proj.weight` (first I rows) and `.up_proj.weight`;
    `*.experts.down_proj` [E, D, I] gives `*.experts.{e}.down_proj.weight`.  The results are views.
    """
    named: NamedTensors = []
    for name, tensor in named_tensors:
        if not _is_fused(name):
            named.append((name, tensor))
            continue
        named.extend((part_name, tensor[index]) for part_name, index, _ in _split(name, tuple(tensor.shape)))
    return named


def _split(name: str, shape: tuple[int, ...]) -> list[tuple[str, Index, tuple[int, ...] | None]]:
    """Name, index and shape of each checkpoint tensor inside `name`; (name, (), None) for what is not fused."""
    if not _is_fused(name):
        return [(name, (), None)]
    prefix, _, kind = name.rpartition(".")
    if len(shape) != 3 or (kind == "gate_up_proj" and shape[1] % 2):
        raise WeightRequestError(f"{name}: not a fused expert tensor, shape {list(shape)}")
    num_experts, num_rows, num_columns = shape
    parts: list[tuple[str, Index, tuple[int, ...] | None]] = []
    for logical_expert in range(num_experts):
        stem = f"{prefix}.{logical_expert}"
        if kind == "down_proj":
            parts.append((f"{stem}.down_proj.weight", (logical_expert,), (num_rows, num_columns)))
            continue
        width = num_rows // 2
        gate, up = (logical_expert, slice(0, width)), (logical_expert, slice(width, num_rows))
        parts.append((f"{stem}.gate_proj.weight", gate, (width, num_columns)))
        parts.append((f"{stem}.up_proj.weight", up, (width, num_columns)))
    return parts


def _is_fused(name: str) -> bool:
    prefix, _, kind = name.rpartition(".")
    return prefix.endswith("experts") and kind in ("gate_up_proj", "down_proj")


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are one in memory.

    By storage, not by address: a rank whose shard is empty has no address, and all ranks must come to the same
    answer.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()._cdata
    return (storage, local.storage_offset(), tensor.dtype, tuple(tensor.shape), local.stride())

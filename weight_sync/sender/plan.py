"""The plan of a refresh: tensors by checkpoint name, each a part of one of the trainer's tensors.

It is made from models and state dicts, whole or sharded (DTensor), without copying anything: the cast to the engine's
dtype happens when a bucket is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weight_sync.errors import WeightRequestError
from weight_sync.fused_experts import fused_pieces, is_fused, layout_of
from weight_sync.tensor_meta import Piece, TensorMeta

NamedTensors = list[tuple[str, torch.Tensor]]
TensorSource = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_COMPILED = "_orig_mod."  # torch.compile's addition to names
_NEVER_CAST = ".e_score_correction_bias"


@dataclass(frozen=True)
class Part:
    """One tensor to send: `piece` of the trainer's tensor `source`, cast to `meta.dtype`."""

    meta: TensorMeta
    source: str
    piece: Piece

    @property
    def is_fused(self) -> bool:
        """A fused expert tensor that goes as it is: the engine splits it, so it has no fingerprint of its own."""
        return is_fused(self.meta.name)


@dataclass(frozen=True)
class TensorPlan:
    """The trainer's tensors by name, and the parts of them that are sent, by name."""

    sources: dict[str, torch.Tensor]
    parts: dict[str, Part]

    @property
    def metas(self) -> list[TensorMeta]:
        return [part.meta for part in self.parts.values()]


def plan_tensors(source: TensorSource, dtype: torch.dtype | None = None, split_experts: bool = True) -> TensorPlan:
    """Plan the tensors of `source`: a model, its state dict, or (name, tensor) pairs; of the first two, tied tensors
    are sent once.

    `dtype`: what floating-point tensors are sent as; None: as they are.  `split_experts`: see `split_fused_experts`.
    Raises `WeightRequestError` for a name given twice, or a fused expert tensor that cannot be split.
    """
    sources: dict[str, torch.Tensor] = {}
    named = named_tensors_of(source) if isinstance(source, torch.nn.Module | Mapping) else source
    for name, tensor in named:
        if name in sources:
            raise WeightRequestError(f"{name} is given twice")
        sources[name] = tensor.detach()
    parts: dict[str, Part] = {}
    for name, tensor in sources.items():
        sent_as = tensor.dtype if dtype is None or not is_cast(name, tensor) else dtype
        shape = tuple(tensor.shape)
        for piece in _split(name, shape, sources) if split_experts else [Piece(name)]:
            if piece.name in parts:
                raise WeightRequestError(f"{piece.name} is given twice")
            sizes = piece.shape_in(shape) if piece.index or piece.transposed else shape
            parts[piece.name] = Part(TensorMeta(piece.name, sent_as, sizes), name, piece)
    return TensorPlan(sources, parts)


def named_tensors_of(
    source: torch.nn.Module | Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> NamedTensors:
    """Return the tensors of a model or state dict by checkpoint name, each content once.

    Of tensors that share their memory (tied embeddings) only the first is kept.  `dtype`: the engine's; floating-point
    tensors are cast to it, which copies them, but the correction biases of routers, which engines hold in float32;
    without it the tensors are the model's own.
    """
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    names, tensors = list(state), list(state.values())
    named: NamedTensors = []
    for number in untied(tensors):
        name, tensor = names[number], tensors[number]
        cast = dtype is not None and is_cast(name, tensor)
        named.append((sent_name(name), tensor.detach().to(dtype) if cast else tensor.detach()))
    return named


def untied(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of the tensors that are not one in memory with an earlier one."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for number, tensor in enumerate(tensors):
        key = _place(tensor)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept.append(number)
    return kept


def sent_name(name: str) -> str:
    """Return the checkpoint name of a tensor that a model or its state dict has under `name`."""
    return name.replace(_COMPILED, "")


def is_cast(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is cast to the engine's dtype, if one is given."""
    return tensor.is_floating_point() and not name.endswith(_NEVER_CAST)


def split_fused_experts(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    """Split fused expert tensors of transformers 5 into per-expert checkpoint tensors; everything else as it is.

    As in `weight_sync.fused_experts`; which of the layouts there it is, the biases of the same layer tell, so they
    come in one call.  The results are views.
    """
    given = list(named_tensors)
    names = {name for name, _ in given}
    named: NamedTensors = []
    for name, tensor in given:
        if not is_fused(name):
            named.append((name, tensor))
            continue
        named.extend((piece.name, piece.of(tensor)) for piece in _split(name, tuple(tensor.shape), names))
    return named


def _split(name: str, shape: tuple[int, ...], names: Collection[str]) -> list[Piece]:
    """Return the checkpoint tensors inside `name`, that comes with `names`; itself where it is not fused."""
    return fused_pieces(name, shape, layout_of(name, names)) if is_fused(name) else [Piece(name)]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors that are one in memory.

    By storage, not by address: a rank whose shard is empty has no address, and all ranks must come to the same
    answer.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()._cdata
    return (storage, local.storage_offset(), tensor.dtype, tuple(tensor.shape), local.stride())

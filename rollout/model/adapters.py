"""`AdapterTable`: sole owner of the adapters that a model serves: their slots, names and versions.

    slot 0..S-1   one adapter, in every layer that any adapter changes
    slot -1       no adapter

A module is found by the name of its weight, as a tensor of a refresh is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rollout.adapters.peft_folder import Adapter, LoraWeights
from rollout.core.errors import AdapterError, NotFound
from rollout.core.messages.req_output import AdapterLabel
from rollout.layers.linear import AdaptedLinear
from rollout.layers.lora import LoraModule, SlotSizes
from rollout.model.decoder import DecoderForCausalLM
from weight_sync.errors import WeightSyncError

_NO_SIZES = SlotSizes(0, 0)
_REASONS = {
    ".experts": "adapters of routed experts are not served",
    "embed_tokens": "the embedding is not adapted",
    "lm_head": "the output head is not adapted",
    "kv_b_proj": "kv_b_proj is absorbed into queries and values, and not adapted",
}


class ServedAdapter(NamedTuple):
    """An adapter in its slot."""

    label: AdapterLabel
    slot: int


class _Place(NamedTuple):
    layer: AdaptedLinear
    module: LoraModule


class _Write(NamedTuple):
    """Matrices of an adapter, checked and in the dtype of the layer, with the scale within B."""

    place: _Place
    a: torch.Tensor
    b: torch.Tensor


class AdapterTable:
    """The adapters of `model`, in at most `sizes.slots` slots of rank `sizes.rank`."""

    def __init__(self, model: DecoderForCausalLM, sizes: SlotSizes = _NO_SIZES) -> None:
        self._model, self._sizes = model, sizes
        self._by_name: dict[str, ServedAdapter] = {}
        self._places = {
            name: _Place(layer, module)
            for prefix, layer in model.named_layers()
            if isinstance(layer, AdaptedLinear)
            for name, module in layer.lora_modules(prefix).items()
        }

    @property
    def labels(self) -> list[AdapterLabel]:
        return [served.label for served in self._by_name.values()]

    def find(self, name: str) -> ServedAdapter:
        """Return the adapter of this name.  Raises `NotFound`."""
        if name not in self._by_name:
            raise NotFound(unknown_adapter(name, list(self._by_name)))
        return self._by_name[name]

    def add(self, name: str, adapter: Adapter) -> ServedAdapter:
        """Put an adapter into a free slot, as version 0 of its name.

        Raises `AdapterError`, and changes nothing, for modules that the model lacks or that are not adapted, other
        shapes than the model's, a rank over that of the slots, and where no slot is free.
        """
        if len(self._by_name) >= self._sizes.slots:
            raise AdapterError(f"all {self._sizes.slots} slots are taken (--max-loras-per-batch)")
        writes = self._prepared(adapter)
        served = ServedAdapter(AdapterLabel(name, 0, adapter.digest), len(self._by_name))
        for (layer, module), a_RD, b_OR in writes:
            layer.reserve_lora(self._sizes).write(served.slot, module.part, a_RD, b_OR)
        self._by_name[name] = served
        return served

    def _prepared(self, adapter: Adapter) -> list[_Write]:
        found: dict[str, _Write] = {}
        for name, weights in adapter.modules.items():
            canonical = self._canonical(name)
            if canonical in found:
                raise AdapterError(f"{name} is there under two names")
            found[canonical] = self._checked(name, self._places[canonical], weights)
        return list(found.values())

    def _canonical(self, name: str) -> str:
        """Return the model's name of a module that may be adapted.  Raises `AdapterError`."""
        reason = next((reason for part, reason in _REASONS.items() if part in name), None)
        if reason is not None:
            raise AdapterError(f"{name}: {reason}")
        try:
            canonical = self._model.weights.canonical_name(f"{name}.weight").removesuffix(".weight")
        except WeightSyncError as error:
            raise AdapterError(f"{error}: the adapter belongs to another model") from None
        if canonical not in self._places:
            raise AdapterError(f"{name} is not a linear layer that adapters may change")
        return canonical

    def _checked(self, name: str, place: _Place, weights: LoraWeights) -> _Write:
        a_RD, b_OR, scale = weights
        wanted = (place.module.outputs.total, place.module.inputs.total)
        got = (b_OR.shape[0], a_RD.shape[1])
        if got != wanted:
            raise AdapterError(f"{name} is adapted from {got[1]} to {got[0]} features; the model has {wanted[::-1]}")
        if weights.rank > self._sizes.rank:
            raise AdapterError(f"{name} has rank {weights.rank}; --max-lora-rank is {self._sizes.rank}")
        dtype = place.layer.storage.build.dtype
        wide = torch.promote_types(b_OR.dtype, torch.float32)
        stored = _Write(place, a_RD.to(dtype), (b_OR.to(wide) * scale).to(dtype))
        if not (stored.a.isfinite().all() and stored.b.isfinite().all()):
            raise AdapterError(f"{name} has values beyond {str(dtype).removeprefix('torch.')}")
        return stored


def unknown_adapter(name: str, known: Sequence[str]) -> str:
    """Return the message on the name of an adapter that is not served."""
    return f"there is no adapter {name[:200]!r}; this server has {', '.join(known) or 'none'}"


def slots_of_tokens(requests: Sequence[tuple[int, int]]) -> torch.Tensor | None:
    """Return the slot of each token [T] int64, of (slot, number of tokens) of each request; None if all are -1."""
    if all(slot < 0 for slot, _ in requests):
        return None
    slots, counts = torch.tensor(requests, dtype=torch.int64).unbind(1)
    return slots.repeat_interleave(counts)

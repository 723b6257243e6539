"""`AdapterPlaces`: which layers of a model adapters change, and an adapter checked and converted for them.

A module is found by the name of its weight, as a tensor of a refresh is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from rollout.adapters.peft_folder import Adapter, LoraWeights
from rollout.core.errors import AdapterError
from rollout.layers.lora import AdaptedLayer, AdapterSlots, LoraModule, SlotSizes
from rollout.model.decoder import DecoderForCausalLM
from weight_sync.errors import WeightSyncError

_REASONS = {
    ".experts": "adapters of routed experts are not served",
    "embed_tokens": "the embedding is not adapted",
    "lm_head": "the output head is not adapted",
}


class _Place(NamedTuple):
    layer: AdaptedLayer
    module: LoraModule


class Write(NamedTuple):
    """Matrices of an adapter, checked and in the dtype of the layer, with the scale within B."""

    place: _Place
    a: torch.Tensor
    b: torch.Tensor


class AdapterPlaces:
    """The modules of `model` that adapters may change, each with slots of `sizes`.

    Every such layer gets its slots here, as a recorded forward holds for the layers that had some when it was recorded.
    """

    def __init__(self, model: DecoderForCausalLM, sizes: SlotSizes) -> None:
        self._model, self._sizes = model, sizes
        self._slots: list[AdapterSlots] = []
        self._places: dict[str, _Place] = {}
        for prefix, layer in model.named_layers():
            if not isinstance(layer, AdaptedLayer):
                continue
            modules = {name: module for name, module in layer.lora_modules(prefix).items() if _reason(name) is None}
            self._places |= {name: _Place(layer, module) for name, module in modules.items()}
            if modules and sizes.slots:
                self._slots.append(layer.reserve_lora(sizes))

    @property
    def max_rank(self) -> int:
        """The greatest rank of a module."""
        return self._sizes.rank

    @property
    def max_bytes(self) -> int:
        """The bytes of an adapter of the greatest rank of all modules, in the widest dtype."""
        return sum(map(sum, self.features.values())) * self._sizes.rank * torch.float64.itemsize

    @property
    def features(self) -> dict[str, tuple[int, int]]:
        """The numbers of features that modules take and give, by the model's name of the module."""
        modules = {name: place.module for name, place in self._places.items()}
        return {name: (module.inputs.total, module.outputs.total) for name, module in modules.items()}

    def prepared(self, adapter: Adapter) -> list[Write]:
        """Return what is to be written into a slot.  Changes nothing, and may be called on any thread.

        Raises `AdapterError` for modules that the model lacks or that are not adapted, other shapes than the model's, a
        rank over that of the slots, and values beyond the model's dtype.
        """
        found: dict[str, Write] = {}
        for name, weights in adapter.modules.items():
            canonical = self.canonical(name)
            if canonical in found:
                raise AdapterError(f"{name} is there under two names")
            found[canonical] = self._checked(name, self._places[canonical], weights)
        return list(found.values())

    def write(self, slot: int, writes: Iterable[Write]) -> None:
        """Replace the content of a slot that no request uses."""
        for slots in self._slots:
            slots.clear(slot)
        for (layer, module), a_RD, b_OR in writes:
            assert layer.lora is not None, "every layer of a place has slots"
            layer.lora.write(slot, module.part, a_RD, b_OR)

    def canonical(self, name: str) -> str:
        """Return the model's name of a module that may be adapted.  Raises `AdapterError`."""
        reason = _reason(name)
        if reason is not None:
            raise AdapterError(f"{name}: {reason}")
        try:
            canonical = self._model.weights.canonical_name(f"{name}.weight").removesuffix(".weight")
        except WeightSyncError as error:
            raise AdapterError(f"{error}: the adapter belongs to another model") from None
        if canonical not in self._places:
            raise AdapterError(f"{name} is not a linear layer that adapters may change")
        return canonical

    def _checked(self, name: str, place: _Place, weights: LoraWeights) -> Write:
        a_RD, b_OR, scale = weights
        wanted = (place.module.outputs.total, place.module.inputs.total)
        got = (b_OR.shape[0], a_RD.shape[1])
        if got != wanted:
            raise AdapterError(f"{name} is adapted from {got[1]} to {got[0]} features; the model has {wanted[::-1]}")
        if weights.rank > self._sizes.rank:
            raise AdapterError(f"{name} has rank {weights.rank}; --max-lora-rank is {self._sizes.rank}")
        assert place.layer.lora is not None, "every layer of a place has slots"
        dtype = place.layer.lora.dtype
        wide = torch.promote_types(b_OR.dtype, torch.float32)
        stored = Write(place, a_RD.to(dtype), (b_OR.to(wide) * scale).to(dtype))
        if not (stored.a.isfinite().all() and stored.b.isfinite().all()):
            raise AdapterError(f"{name} has values beyond {str(dtype).removeprefix('torch.')}")
        return stored


def _reason(name: str) -> str | None:
    return next((reason for part, reason in _REASONS.items() if part in name), None)

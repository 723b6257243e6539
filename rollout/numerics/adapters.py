"""The LoRA adapter of a trainer's model: what PEFT computes with, as the engine holds it in a slot.

PEFT puts a module around each matrix that an adapter changes: `base_layer`, and `lora_A` and `lora_B` of each adapter.
The active one counts.  The engine multiplies the scale into B and rounds both; gradients go straight through that.

Shapes: D input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollout.adapters.peft_folder import Adapter, LoraWeights
from rollout.core.errors import UnsupportedFeature
from rollout.layers.lora import LoraPlace
from rollout.model.adapter_places import AdapterPlaces, LinearPlace, is_dense
from rollout.numerics.assembly import Assembly

_BASE = ".base_layer"


def without_peft(model: Any) -> Any:
    """Return the model inside a `PeftModel`, whose layers have the adapters; any other model as it is.

    Raises `UnsupportedFeature` for adapters of other kinds than LoRA.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "get_base_model"):
        return model
    for name, config in configs.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA" or getattr(config, "is_prompt_learning", False):
            raise UnsupportedFeature(f"engine numerics take adapters of LoRA; {name!r} is {kind}")
    return model.get_base_model()


def greatest_rank(model: nn.Module) -> int:
    """Return the greatest rank of an adapter of a linear layer in the model; 0 without any."""
    linear = (module for _, module in _adapted(model) if not hasattr(module, "parameter_name"))
    ranks = (a.weight.shape[0] for module in linear for a in module.lora_A.values())
    return max(ranks, default=0)


def base_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the tensors of adapters, and return the others by the names that they have without PEFT."""
    adapted, found = {path for path, _ in _adapted(model)}, {}
    for name, tensor in tensors.items():
        if name.partition(".lora_")[0] in adapted:
            continue
        path, base, end = name.rpartition(_BASE)
        if base and path in adapted:
            while path.endswith(_BASE):  # PEFT puts a wrapper for each parameter around the experts of a layer
                path = path.removesuffix(_BASE)
            name = path + end
        found[name] = tensor
    return found


def active_adapter(model: nn.Module) -> dict[str, LoraWeights]:
    """Return what the active adapter does to each module, by the module's name; empty without one.

    Raises `UnsupportedFeature` for several adapters at once, for merged ones, and for variants of LoRA.
    """
    found, names = {}, set()
    for path, module in _adapted(model):
        if module.merged:
            raise UnsupportedFeature(f"engine numerics take adapters that are not merged: {path} has one that is")
        active = [] if module.disable_adapters else [each for each in module.active_adapters if each in module.scaling]
        names.update(active)
        if len(names) > 1:
            raise UnsupportedFeature(f"engine numerics take one active adapter, got {', '.join(sorted(names))}")
        for name in active:
            found[path] = _weights_of(path, module, name)
    return found


def _weights_of(path: str, module: Any, name: str) -> LoraWeights:
    """Return what an adapter does to a module.

    Raises `UnsupportedFeature` for routed experts, and for all but products with A and B.
    """
    if not is_dense(f"{path}."):
        raise UnsupportedFeature(f"engine numerics do not compute adapters of routed experts: {path} has one")
    if name not in module.lora_A or hasattr(module, "parameter_name"):  # of an embedding, or of a parameter
        raise UnsupportedFeature(f"engine numerics take adapters of linear layers: {path} is none")
    a, b = module.lora_A[name], module.lora_B[name]
    if (
        name in (*getattr(module, "lora_variant", ()), *module.lora_magnitude_vector)
        or a.bias is not None
        or b.bias is not None
    ):
        raise UnsupportedFeature(f"engine numerics take plain LoRA: {path} is adapted by a variant, or with a bias")
    return LoraWeights(a.weight, b.weight, float(module.scaling[name]))


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that PEFT put around a layer, by path."""
    found = ((path, module) for path, module in model.named_modules() if hasattr(module, "lora_A"))
    return [(path, module) for path, module in found if hasattr(module, "active_adapters")]


@dataclass(frozen=True)
class _Part:
    """A trainer's matrix of `shape`, and its place in a layer's slots."""

    name: str
    shape: torch.Size
    place: LoraPlace


class SlotAssembly(Assembly):
    """A tensor of a layer's slots, of which there is one, made of the trainer's tensors `names`."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(shape, ())
        self._parts: list[_Part] = []

    def add(self, part: _Part) -> None:
        """Take another of the trainer's tensors."""
        self._parts.append(part)
        self.names = (*self.names, part.name)

    def matrix(self, tensors: Sequence[torch.Tensor], rounded_to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        matrix = torch.zeros(self.shape, dtype=dtype, device=tensors[0].device)
        for part, tensor in zip(self._parts, tensors, strict=True):
            part.place.put(matrix, tensor.detach().to(rounded_to).to(dtype))
        return matrix

    def gradients(self, gradient: torch.Tensor, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for part, is_wanted in zip(self._parts, wanted, strict=True):
            if not is_wanted:
                found.append(None)
                continue
            of_part = gradient.new_zeros(part.shape)  # a tensor may lie in several tensors, a part of it in each
            part.place.take(gradient, of_part)
            found.append(of_part)
        return found


class TrainedAdapter:
    """The adapter of a trainer's model in the engine's model, in one slot of each layer that may have one."""

    def __init__(self, places: AdapterPlaces) -> None:
        self._places = places
        self.named: dict[str, torch.Tensor] = {}
        self.assemblies: dict[int, SlotAssembly] = {}

    @property
    def is_active(self) -> bool:
        return bool(self.named)

    def load(self, modules: Mapping[str, LoraWeights]) -> None:
        """Take the adapter as it is now, rounded as the engine's load rounds it.  Raises `AdapterError`."""
        held = {name: LoraWeights(a.detach(), b.detach(), scale) for name, (a, b, scale) in modules.items()}
        writes = self._places.prepared(Adapter(held, ""))
        self._places.write(0, writes)
        self.named, self.assemblies = {}, {}
        for (name, (a_RD, b_OR, scale)), write in zip(modules.items(), writes, strict=True):
            assert isinstance(write.place, LinearPlace), "engine numerics adapt linear layers"
            slots, module, rank = write.place.layer.lora, write.place.module, a_RD.shape[0]
            assert slots is not None, "every layer of a place has slots"
            self.named |= {f"{name}.lora_A": a_RD, f"{name}.lora_B": b_OR.float() * scale}
            for place in slots.places_a(0, module.part, rank):
                self._add(_Part(f"{name}.lora_A", a_RD.shape, place))
            for place in slots.places_b(0, module.part, rank):
                self._add(_Part(f"{name}.lora_B", b_OR.shape, place))

    def _add(self, part: _Part) -> None:
        slots = part.place.slots
        self.assemblies.setdefault(id(slots), SlotAssembly(slots.shape)).add(part)

"""The LoRA adapter of a trainer's model: what PEFT computes with, as the engine holds it in a slot.

PEFT puts a module around each matrix that an adapter changes: `base_layer`, and `lora_A` and `lora_B` of each adapter.
Around the routed experts of a layer it puts one for each of their two parameters.  The active adapter counts.  The
engine multiplies the scale into B and rounds both; gradients go straight through that.

Shapes: E experts, D input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollout.adapters.expert_stacks import WRAPPED, is_stack, stacked
from rollout.adapters.peft_folder import Adapter, LoraWeights
from rollout.core.errors import UnsupportedFeature
from rollout.layers.lora import LoraPlace
from rollout.model.adapter_places import AdapterPlaces, is_dense
from rollout.numerics.assembly import Assembly


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
    """Return the greatest rank of an adapter in the model; 0 without any."""
    ranks = (a.weight.shape[0] // _num_stacked(module) for _, module in _adapted(model) for a in module.lora_A.values())
    return max(ranks, default=0)


def adapts_experts(model: nn.Module) -> bool:
    """Return whether PEFT has put a module around routed experts."""
    return any(not is_dense(f"{path}.") for path, _ in _adapted(model))


def base_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the tensors of adapters, and return the others by the names that they have without PEFT."""
    adapted, found = {path for path, _ in _adapted(model)}, {}
    for name, tensor in tensors.items():
        if name.partition(".lora_")[0] in adapted:
            continue
        path, base, end = name.rpartition(WRAPPED)
        if base and path in adapted:
            name = _without_wrappers(path) + end
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
            found[_name_of(path, module)] = _weights_of(path, module, name)
    return found


def _weights_of(path: str, module: Any, name: str) -> LoraWeights:
    """Return what an adapter does to a module: of a parameter of all experts A [E, R, D] and B [E, O, R].

    Raises `UnsupportedFeature` for all but products with A and B, and for parameters of other modules than experts.
    """
    if name not in module.lora_A or (hasattr(module, "parameter_name") and not is_stack(_name_of(path, module))):
        raise UnsupportedFeature(
            f"engine numerics take adapters of linear layers and of routed experts: {path} is none"
        )
    a, b = module.lora_A[name], module.lora_B[name]
    if (
        name in (*getattr(module, "lora_variant", ()), *module.lora_magnitude_vector)
        or a.bias is not None
        or b.bias is not None
    ):
        raise UnsupportedFeature(f"engine numerics take plain LoRA: {path} is adapted by a variant, or with a bias")
    sides, scale = (a.weight, b.weight), float(module.scaling[name])
    if hasattr(module, "parameter_name"):
        sides = stacked(path, *sides, a.weight.shape[0] // _num_stacked(module))
    return LoraWeights(*sides, scale)


def _name_of(path: str, module: Any) -> str:
    """Return the name of the matrix, or of the parameter of all experts, that a module of PEFT's is around."""
    if not hasattr(module, "parameter_name"):
        return path
    return f"{_without_wrappers(path)}.{module.parameter_name}"


def _without_wrappers(path: str) -> str:
    while path.endswith(WRAPPED):  # PEFT puts a wrapper for each parameter around the experts of a layer
        path = path.removesuffix(WRAPPED)
    return path


def _num_stacked(module: Any) -> int:
    """Return the number of experts whose matrices lie in one A and one B; 1 for a linear layer."""
    return int(module.num_experts) if hasattr(module, "parameter_name") else 1


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that PEFT put around a layer, by path."""
    found = ((path, module) for path, module in model.named_modules() if hasattr(module, "lora_A"))
    return [(path, module) for path, module in found if hasattr(module, "active_adapters")]


@dataclass(frozen=True)
class _Part:
    """A matrix in a trainer's tensor of `shape`: the view that `like` is of a contiguous one; its place in slots."""

    shape: torch.Size
    like: torch.Tensor
    place: LoraPlace

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.storage_offset() + self.like.storage_offset()  # a parameter may lie within a larger storage
        return tensor.as_strided(self.like.size(), self.like.stride(), start)


class SlotAssembly(Assembly):
    """A tensor of a layer's slots, of which there is one, made of the trainer's tensors `names`."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(shape, ())
        self._parts: dict[str, list[_Part]] = {}

    def add(self, name: str, part: _Part) -> None:
        """Take another place of a matrix in the trainer's tensor `name`: gate and up of an expert share their A."""
        self._parts.setdefault(name, []).append(part)
        self.names = tuple(self._parts)

    def matrix(self, tensors: Sequence[torch.Tensor], rounded_to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        matrix = torch.zeros(self.shape, dtype=dtype, device=tensors[0].device)
        for parts, tensor in zip(self._parts.values(), tensors, strict=True):
            rounded = tensor.detach().to(rounded_to).to(dtype).contiguous()
            for part in parts:
                part.place.put(matrix, part.of(rounded))
        return matrix

    def gradients(self, gradient: torch.Tensor, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for parts, is_wanted in zip(self._parts.values(), wanted, strict=True):
            if not is_wanted:
                found.append(None)
                continue
            whole = gradient.new_zeros(parts[0].shape)  # a tensor may lie in several tensors, a part of it in each
            for part in parts:
                part.place.add_to(part.of(whole), gradient)
            found.append(whole)
        return found


class TrainedAdapter:
    """The adapter of a trainer's model in the engine's model, in one slot of each layer that may have one."""

    def __init__(self, places: AdapterPlaces) -> None:
        self._places = places
        self._shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        self.named: dict[str, torch.Tensor] = {}
        self.assemblies: dict[int, SlotAssembly] = {}

    @property
    def is_active(self) -> bool:
        return bool(self.named)

    def load(self, modules: Mapping[str, LoraWeights]) -> None:
        """Take the adapter as it is now, rounded as the engine's load rounds it.  Raises `AdapterError`."""
        held = {name: LoraWeights(a.detach(), b.detach(), scale) for name, (a, b, scale) in modules.items()}
        self._places.write(0, self._places.prepared(Adapter(held, "")))
        self.named = {}
        for name, (a, b, scale) in modules.items():
            self.named |= {f"{name}.lora_A": a, f"{name}.lora_B": b.float() * scale}
        shapes = {name: (a.shape, b.shape) for name, (a, b, _) in modules.items()}
        if shapes != self._shapes:
            self._shapes, self.assemblies = shapes, {}
            for name, shape in shapes.items():
                self._assemble(name, *shape)

    def _assemble(self, name: str, shape_a: torch.Size, shape_b: torch.Size) -> None:
        """Find the places of all matrices of a module: of itself, or of each expert."""
        whole = LoraWeights(torch.empty(shape_a, device="meta"), torch.empty(shape_b, device="meta"), 1.0)
        for place, (a_RD, b_OR, _) in self._places.matrices_of(name, whole):
            for at in place.places_a(0, a_RD.shape[0]):
                self._add(f"{name}.lora_A", _Part(shape_a, a_RD, at))
            for at in place.places_b(0, a_RD.shape[0]):
                self._add(f"{name}.lora_B", _Part(shape_b, b_OR, at))

    def _add(self, name: str, part: _Part) -> None:
        slots = part.place.slots
        self.assemblies.setdefault(id(slots), SlotAssembly(slots.shape)).add(name, part)

"""`AdapterPlaces`: which layers of a model adapters change, and an adapter checked and converted for them.

A module is found by the name of its weight, as a tensor of a refresh is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from rollout.adapters.expert_stacks import WRAPPED, is_stack, of_expert, parts_of
from rollout.adapters.peft_folder import Adapter, LoraWeights
from rollout.core.errors import AdapterError
from rollout.kernels.ops import ExpertPart
from rollout.layers.layer import Layer
from rollout.layers.lora import AdaptedLayer, AdapterSlots, LoraModule, LoraPlace, SlotSizes
from rollout.layers.moe.expert_lora import ExpertLoraSlots
from rollout.layers.moe.experts import Experts
from rollout.model.decoder import DecoderForCausalLM
from weight_sync.errors import WeightSyncError

_REASONS = {
    "embed_tokens": "the embedding is not adapted",
    "lm_head": "the output head is not adapted",
}


SlotContent = list[list[torch.Tensor]]
"""The content of a slot, by layer: `AdapterSlots.content`."""


class LinearPlace(NamedTuple):
    """A matrix of a linear layer, or one that latent attention absorbs."""

    layer: AdaptedLayer
    module: LoraModule

    @property
    def features(self) -> tuple[int, int]:
        """The numbers of features that the whole matrix takes and gives."""
        return self.module.inputs.total, self.module.outputs.total

    @property
    def dtype(self) -> torch.dtype:
        assert self.layer.lora is not None, "every layer of a place has slots"
        return self.layer.lora.dtype

    def write(self, slot: int, a_RD: torch.Tensor, b_OR: torch.Tensor) -> None:
        assert self.layer.lora is not None, "every layer of a place has slots"
        self.layer.lora.write(slot, self.module.part, a_RD, b_OR)

    def places_a(self, slot: int, rank: int) -> list[LoraPlace]:
        """Return the places of A [R, D] of an adapter."""
        assert self.layer.lora is not None, "every layer of a place has slots"
        return self.layer.lora.places_a(slot, self.module.part, rank)

    def places_b(self, slot: int, rank: int) -> list[LoraPlace]:
        """Return the places of B [O, R] of an adapter."""
        assert self.layer.lora is not None, "every layer of a place has slots"
        return self.layer.lora.places_b(slot, self.module.part, rank)


class ExpertPlace(NamedTuple):
    """A matrix of a routed expert, with all copies of it."""

    experts: Experts
    logical_expert: int
    part: ExpertPart

    @property
    def features(self) -> tuple[int, int]:
        """The numbers of features that the whole matrix takes and gives."""
        hidden, inner = self.experts.hidden_size, self.experts.inner.total
        return (inner, hidden) if self.part == "down_proj" else (hidden, inner)

    @property
    def dtype(self) -> torch.dtype:
        return self.experts.build.dtype

    def write(self, slot: int, a_RD: torch.Tensor, b_OR: torch.Tensor) -> None:
        """Write to each copy on this rank, where the map in force has it."""
        assert self.experts.lora is not None, "every layer of a place has slots"
        for local in self._stored:
            self.experts.lora.write(slot, local, self.part, a_RD, b_OR)

    def places_a(self, slot: int, rank: int) -> list[LoraPlace]:
        """Return the place of A [R, D] of an adapter in each copy on this rank."""
        assert self.experts.lora is not None, "every layer of a place has slots"
        return [self.experts.lora.place_a(slot, local, self.part, rank) for local in self._stored]

    def places_b(self, slot: int, rank: int) -> list[LoraPlace]:
        """Return the place of B [O, R] of an adapter in each copy on this rank."""
        assert self.experts.lora is not None, "every layer of a place has slots"
        return [self.experts.lora.place_b(slot, local, self.part, rank) for local in self._stored]

    @property
    def _stored(self) -> list[int]:
        return self.experts.placement.local_slots(self.experts.moe_layer, self.logical_expert)


class Write(NamedTuple):
    """Matrices of an adapter, checked and in the dtype of the layer, with the scale within B."""

    place: LinearPlace | ExpertPlace
    a: torch.Tensor
    b: torch.Tensor


def is_dense(module: str) -> bool:
    """Return whether a module is none of a routed expert."""
    return ".experts." not in module


class AdapterPlaces:
    """The modules of `model` that are `wanted` and that adapters may change, each with slots of `sizes`.

    Every such layer gets its slots here, as a recorded forward holds for the layers that had some when it was recorded.
    """

    def __init__(self, model: DecoderForCausalLM, sizes: SlotSizes, wanted: Callable[[str], bool] = is_dense) -> None:
        self._model, self._sizes = model, sizes
        self._slots: list[AdapterSlots | ExpertLoraSlots] = []
        self._places: dict[str, LinearPlace | ExpertPlace] = {}
        self._experts: dict[str, Experts] = {}
        for prefix, layer in model.named_layers():
            if not isinstance(layer, AdaptedLayer | Experts):
                continue
            places = {name: place for name, place in _places_in(prefix, layer) if wanted(name) and not _reason(name)}
            if not places:
                continue
            if isinstance(layer, Experts):
                self._experts[prefix] = layer
            self._places |= places
            if sizes.slots:
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
        return {name: place.features for name, place in self._places.items()}

    @property
    def adapts_experts(self) -> bool:
        """True if adapters may change routed experts."""
        return bool(self._experts)

    @property
    def stacks(self) -> dict[str, tuple[int, dict[str, tuple[int, int]]]]:
        """The number of experts, and the features of `gate_up_proj` and `down_proj`, by the experts' name."""
        found = {}
        for name, experts in self._experts.items():
            hidden, inner = experts.hidden_size, experts.inner.total
            features = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
            found[name] = experts.num_logical_experts, features
        return found

    def prepared(self, adapter: Adapter) -> list[Write]:
        """Return what is to be written into a slot.  Changes nothing, and may be called on any thread.

        Raises `AdapterError` for modules that the model lacks or that are not adapted, other shapes than the model's, a
        rank over that of the slots, and values beyond the model's dtype.
        """
        found: dict[str, Write] = {}
        for whole, of_whole in adapter.modules.items():
            for name, weights in self._matrices_of(whole, of_whole):
                canonical = self.canonical(name)
                if canonical in found:
                    raise AdapterError(f"{name} is there under two names")
                found[canonical] = self._checked(name, self._places[canonical], weights)
        return list(found.values())

    def write(self, slot: int, writes: Iterable[Write]) -> None:
        """Replace the content of a slot that no request uses."""
        for slots in self._slots:
            slots.clear(slot)
        for place, a_RD, b_OR in writes:
            place.write(slot, a_RD, b_OR)

    def content(self, slot: int) -> SlotContent:
        """Return a copy of what a slot holds in each layer of this rank."""
        return [slots.content(slot) for slots in self._slots]

    def restore(self, slot: int, content: SlotContent) -> None:
        """Put back what `content` returned."""
        for slots, matrices in zip(self._slots, content, strict=True):
            slots.restore(slot, matrices)

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
            raise AdapterError(f"{name}: {self._why_not(canonical)}")
        return canonical

    def canonical_sent(self, name: str) -> str:
        """Return `canonical(name)`; of a wrapper of PEFT's around all experts of a layer, their name and its end.

        Raises `AdapterError`.
        """
        experts = name.removesuffix(WRAPPED)
        if not experts.endswith(".experts"):
            return self.canonical(name)
        first = ".0.down_proj"
        return self.canonical(experts + first).removesuffix(first) + name.removeprefix(experts)

    def _why_not(self, canonical: str) -> str:
        """Return why a module that the model has cannot be adapted."""
        modules = (name for prefix, layer in self._model.named_layers() for name, _ in _places_in(prefix, layer))
        if canonical not in modules:
            return "it is not a linear layer that adapters may change"
        what = "linear layers like this" if is_dense(canonical) else "routed experts"
        return f"this server has no memory for adapters of {what}: start it with --lora-target-modules all"

    def matrices_of(self, name: str, weights: LoraWeights) -> Iterator[tuple[LinearPlace | ExpertPlace, LoraWeights]]:
        """Yield the matrices of a module as views, each with its place.  Raises `AdapterError`."""
        for matrix, of_matrix in self._matrices_of(name, weights):
            yield self._places[self.canonical(matrix)], of_matrix

    def _matrices_of(self, name: str, weights: LoraWeights) -> Iterator[tuple[str, LoraWeights]]:
        """Yield the matrices of a module, by name: itself, or the ones of each expert.  Raises `AdapterError`."""
        if not is_stack(name):
            yield name, weights
            return
        stem, parts = parts_of(name)
        prefix = self.canonical(f"{stem}.0.{parts[0]}").removesuffix(f".0.{parts[0]}")
        experts = self._experts[prefix]
        sizes = {weights.a.shape[0], weights.b.shape[0]} - {1}
        if sizes - {experts.num_logical_experts} or weights.b.shape[1] % len(parts):
            got = f"lora_A {list(weights.a.shape)} and lora_B {list(weights.b.shape)}"
            raise AdapterError(f"{name}: {got} are not of the model's {experts.num_logical_experts} experts")
        for logical_expert in range(experts.num_logical_experts):
            for index, part in enumerate(parts):
                pair = of_expert(weights[:2], logical_expert, index, len(parts), experts.fused_layout)
                yield f"{stem}.{logical_expert}.{part}", LoraWeights(*pair, weights.scale)

    def _checked(self, name: str, place: LinearPlace | ExpertPlace, weights: LoraWeights) -> Write:
        a_RD, b_OR, scale = weights
        got = (a_RD.shape[1], b_OR.shape[0])
        if got != place.features:
            raise AdapterError(f"{name} is adapted from {got[0]} to {got[1]} features; the model has {place.features}")
        if weights.rank > self._sizes.rank:
            raise AdapterError(f"{name} has rank {weights.rank}; --max-lora-rank is {self._sizes.rank}")
        dtype = place.dtype
        wide = torch.promote_types(b_OR.dtype, torch.float32)
        stored = Write(place, a_RD.to(dtype), (b_OR.to(wide) * scale).to(dtype))
        if not (stored.a.isfinite().all() and stored.b.isfinite().all()):
            raise AdapterError(f"{name} has values beyond {str(dtype).removeprefix('torch.')}")
        return stored


def _reason(name: str) -> str | None:
    return next((reason for part, reason in _REASONS.items() if part in name), None)


def _places_in(prefix: str, layer: Layer) -> Iterator[tuple[str, LinearPlace | ExpertPlace]]:
    """Yield the matrices of a layer that adapters may change, by name."""
    if isinstance(layer, AdaptedLayer):
        for name, module in layer.lora_modules(prefix).items():
            yield name, LinearPlace(layer, module)
    if isinstance(layer, Experts):
        parts: tuple[ExpertPart, ...] = ("gate_proj", "up_proj", "down_proj")
        for logical_expert in range(layer.num_logical_experts):
            for part in parts:
                yield f"{prefix}.{logical_expert}.{part}", ExpertPlace(layer, logical_expert, part)

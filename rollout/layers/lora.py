"""The adapters of one layer, by slot; and the modules of a layer that adapters may change.

A module is a matrix of a checkpoint.  Ranks that split it have a part each: of the rows of B where the outputs are
split, of the columns of A where the inputs are.  A rank's product is then its part of the sum over ranks, as the
layer's own is.

Shapes: T tokens, D input features, O output features, here on this rank; S slots, P parts, R greatest rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from rollout.layers.build import Build
from rollout.layers.shard import Shard
from rollout.layers.weight_entry import WeightLayer
from weight_sync.tensor_meta import Region


class SlotSizes(NamedTuple):
    """The number of adapter slots, and the greatest rank of an adapter."""

    slots: int
    rank: int


@dataclass(frozen=True)
class LoraModule:
    """A matrix [outputs.total, inputs.total] of the model that adapters may change: part `part` of a layer.

    `order`: which row of this rank's share comes first, second, ... in the layer; None: as in the matrix.
    """

    part: int
    inputs: Shard
    outputs: Shard
    order: torch.Tensor | None = None


@dataclass(frozen=True)
class LoraPlace:
    """The place of a rank's share of A [R, D] or B [O, R], or of a part of it, in `slots`.

    `part(share)`: the part, a view of the share.  `view(slots)`: its place in a tensor like `slots`, in the part's
    shape.  `order`: see `LoraModule`.
    """

    slots: torch.Tensor
    part: Callable[[torch.Tensor], torch.Tensor]
    view: Callable[[torch.Tensor], torch.Tensor]
    order: torch.Tensor | None = None

    def put(self, slots: torch.Tensor, share: torch.Tensor) -> None:
        """Copy the part of a share into a tensor like `slots`."""
        part = self.part(share)
        self.view(slots).copy_(part if self.order is None else part.index_select(0, self.order))

    def add_to(self, share: torch.Tensor, slots: torch.Tensor) -> None:
        """Add the part in a tensor like `slots` to a share."""
        part, found = self.part(share), self.view(slots)
        if self.order is None:
            part.add_(found)
        else:
            part.index_add_(0, self.order, found)


class AdapterSlots(ABC):
    """Base of the slots of a layer; `ranks` [S, P]: a rank of 0 means that the module is not adapted.

    The tensors keep their places, so that a recorded forward holds for every content.
    """

    def __init__(self, build: Build, sizes: SlotSizes, modules: Sequence[LoraModule]) -> None:
        """Make empty slots for all modules of a layer, in the model's dtype, however the weights are held."""
        self.dtype, self._ops, self._modules = build.dtype, build.ops, modules
        self._ranks = torch.zeros(sizes.slots, len(modules), dtype=torch.int64, device=build.device)

    def clear(self, slot: int) -> None:
        """Empty a slot: it adapts no module."""
        self._ranks[slot] = 0

    def write(self, slot: int, part: int, a_RD: torch.Tensor, b_OR: torch.Tensor) -> None:
        """Put whole matrices, the scale within B, into a slot: this rank keeps its share of them."""
        module, rank = self._modules[part], a_RD.shape[0]
        for place in self.places_a(slot, part, rank):
            place.put(place.slots, share_of(a_RD, 1, module.inputs))
        for place in self.places_b(slot, part, rank):
            place.put(place.slots, share_of(b_OR, 0, module.outputs))
        self._ranks[slot, part] = rank

    @property
    @abstractmethod
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The tensors of A and B, by slot in the first dimension."""

    def content(self, slot: int) -> list[torch.Tensor]:
        """Return copies of what a slot holds: its matrices, and its ranks [P]."""
        return [held[slot].clone() for held in (*self.matrices, self._ranks)]

    def restore(self, slot: int, content: Sequence[torch.Tensor]) -> None:
        """Put back what `content` returned."""
        for held, copy in zip((*self.matrices, self._ranks), content, strict=True):
            held[slot].copy_(copy)

    @abstractmethod
    def places_a(self, slot: int, part: int, rank: int) -> list[LoraPlace]:
        """Return the places of A [R, D] of an adapter."""

    @abstractmethod
    def places_b(self, slot: int, part: int, rank: int) -> list[LoraPlace]:
        """Return the places of B [O, R] of an adapter."""


class LoraSlots(AdapterSlots):
    """Slots of a linear layer: matrices `a` [S, P, D, R] and `b` [S, R, O]."""

    def __init__(self, build: Build, sizes: SlotSizes, modules: Sequence[LoraModule]) -> None:
        super().__init__(build, sizes, modules)
        self._columns = [0, *accumulate(module.outputs.length for module in modules)]
        depth = modules[0].inputs.length
        self.a = build.empty(sizes.slots, len(modules), depth, sizes.rank).zero_()
        self.b = build.empty(sizes.slots, sizes.rank, self._columns[-1]).zero_()

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.b

    def places_a(self, slot: int, part: int, rank: int) -> list[LoraPlace]:
        return [LoraPlace(self.a, _whole, lambda a: a[slot, part, :, :rank].t())]

    def places_b(self, slot: int, part: int, rank: int) -> list[LoraPlace]:
        first, end = self._columns[part], self._columns[part + 1]
        return [LoraPlace(self.b, _whole, lambda b: b[slot, :rank, first:end].t(), self._modules[part].order)]

    def add(self, out_TO: torch.Tensor, hidden_TD: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Return `out` plus the product of each token with the adapter in its slot; -1: without one."""
        return self._ops.add_lora(out_TO, hidden_TD, slots_T, self.a, self.b, self._ranks, self._columns)


class AdaptedLayer(WeightLayer):
    """Base of the layers that adapters may change.  `lora`: their slots, if there are any."""

    lora: AdapterSlots | None = None

    def lora_modules(self, prefix: str) -> dict[str, LoraModule]:
        """Return the matrices that adapters may change, by name, in the order of their parts."""
        raise NotImplementedError

    def reserve_lora(self, sizes: SlotSizes) -> AdapterSlots:
        """Return the slots of this layer's adapters, and make them at the first call."""
        raise NotImplementedError


def _whole(share: torch.Tensor) -> torch.Tensor:
    return share


def share_of(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    """Return the part of a whole tensor that a rank with this shard has."""
    return tensor if shard.is_whole else Region(dim, shard.start, shard.length, shard.sections).of(tensor)

"""The adapters of one linear layer, by slot; and the modules of a layer that adapters may change.

A module is a matrix of a checkpoint.  Ranks that split it have a part each: of the rows of B where the outputs are
split, of the columns of A where the inputs are.  A rank's product is then its part of the sum over ranks, as the
layer's own is.

Shapes: T tokens, D input features, O output features, here on this rank; S slots, P parts, R greatest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from rollout.layers.build import Build
from rollout.layers.shard import Shard
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


class LoraSlots:
    """Matrices `a` [S, P, D, R] and `b` [S, R, O], and `ranks` [S, P]; a rank of 0: the module is not adapted.

    They keep their places, so that a recorded forward holds for every content.
    """

    def __init__(self, build: Build, sizes: SlotSizes, modules: Sequence[LoraModule]) -> None:
        """Make empty slots for all modules of a layer, in the model's dtype, however the weights are held."""
        self._ops, self._modules = build.ops, modules
        self._columns = [0, *accumulate(module.outputs.length for module in modules)]
        depth = modules[0].inputs.length
        self.a = build.empty(sizes.slots, len(modules), depth, sizes.rank).zero_()
        self.b = build.empty(sizes.slots, sizes.rank, self._columns[-1]).zero_()
        self._ranks = torch.zeros(sizes.slots, len(modules), dtype=torch.int64, device=build.device)

    def clear(self, slot: int) -> None:
        """Empty a slot: it adapts no module."""
        self._ranks[slot] = 0

    def write(self, slot: int, part: int, a_RD: torch.Tensor, b_OR: torch.Tensor) -> None:
        """Put whole matrices, the scale within B, into a slot: this rank keeps its share of them."""
        module, rank = self._modules[part], a_RD.shape[0]
        rows = _share(b_OR, 0, module.outputs)
        if module.order is not None:
            rows = rows.index_select(0, module.order)
        self.place_a(self.a, slot, part, rank).copy_(_share(a_RD, 1, module.inputs).t())
        self.place_b(self.b, slot, part, rank).copy_(rows.t())
        self._ranks[slot, part] = rank

    def place_a(self, a: torch.Tensor, slot: int, part: int, rank: int) -> torch.Tensor:
        """Return the place [D, R] of an adapter's matrix in `a`, which has the shape of these slots'."""
        return a[slot, part, :, :rank]

    def place_b(self, b: torch.Tensor, slot: int, part: int, rank: int) -> torch.Tensor:
        """Return the place [R, O] of an adapter's matrix in `b`, which has the shape of these slots'."""
        return b[slot, :rank, self._columns[part] : self._columns[part + 1]]

    def add(self, out_TO: torch.Tensor, hidden_TD: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        """Return `out` plus the product of each token with the adapter in its slot; -1: without one."""
        return self._ops.add_lora(out_TO, hidden_TD, slots_T, self.a, self.b, self._ranks, self._columns)


def _share(tensor: torch.Tensor, dim: int, shard: Shard) -> torch.Tensor:
    return tensor if shard.is_whole else Region(dim, shard.start, shard.length, shard.sections).of(tensor)

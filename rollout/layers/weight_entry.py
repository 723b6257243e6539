"""How a layer says which logical tensors it holds and where: what makes cold load and live refresh the same code.

Knows the record that a layer hands over.  Does not know who collects the records or what writes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weight_sync.tensor_meta import Piece


@dataclass(frozen=True)
class WeightEntry:
    """One logical tensor held by a layer.

    `views()` returns every place where the tensor lives now, at least one, each a view of exactly `shape`.  It is
    called for each write and never cached, because the places of an expert follow the placement in force.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    views: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class FusedForm:
    """A wire tensor that carries several logical tensors at once: accepted in place of them."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class WeightLayer(nn.Module):
    """Base of the layers that hold weights.  `prefix` is the layer's own dotted name in the model."""

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        """Every logical tensor of this layer, children not included."""
        raise NotImplementedError

    def fused_forms(self, prefix: str) -> Iterator[FusedForm]:
        """Wire tensors that carry several of them at once; none unless a layer says otherwise."""
        return iter(())


class SingleWeightLayer(WeightLayer):
    """A layer with one parameter, `weight`, which is one logical tensor unless the layer says otherwise."""

    weight: nn.Parameter

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        yield self.rows_entry(f"{prefix}.weight")

    def rows_entry(self, name: str, rows: slice = slice(None)) -> WeightEntry:
        """The entry of a logical tensor that is `weight[rows]`."""
        view = self.weight[rows]
        return WeightEntry(name, tuple(view.shape), view.dtype, lambda: [self.weight[rows]])


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised weight that never asks for a gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

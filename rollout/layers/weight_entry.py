"""The declaration of a layer's logical tensors and of their places, for cold load and live refresh alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rollout.kernels.places import Place
from rollout.layers.layer import Layer
from weight_sync.held_format import HeldFormat
from weight_sync.tensor_meta import Piece


@dataclass(frozen=True)
class WeightEntry:
    """One logical tensor held by a layer.

    `places()` returns every place of this rank where the tensor, whose shape is `shape`, or one part of it lives now.
    It returns none where all of it lives on other ranks.  It is called for each write and never cached, because the
    places of an expert follow the current placement.  `proposed()` returns the places under the proposed placement;
    None for a tensor that no placement concerns.  `held` is the form that its places hold; None: as it is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: Callable[[], Sequence[Place]]
    proposed: Callable[[], Sequence[Place]] | None = None
    held: HeldFormat | None = None


@dataclass(frozen=True)
class FusedForm:
    """A wire tensor that carries several logical tensors at once, and is accepted in place of them."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class WeightLayer(Layer):
    """Base of the layers that hold weights.  `prefix` is the layer's own dotted name in the model."""

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        """Yield every logical tensor of this layer, children not included."""
        raise NotImplementedError

    @property
    def places_key(self) -> Hashable:
        """A key of the places of its tensors, current and proposed; it changes with them.  By default they stay."""
        return None

    def fused_forms(self, prefix: str) -> Iterator[FusedForm]:
        """Yield the wire tensors that carry several logical tensors at once; by default there are none."""
        return iter(())

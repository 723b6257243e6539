"""`Homes`: the places of a model's logical tensors on this rank, and the storages behind them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from weight_sync.moves import Move, lead_of
from weight_sync.tensor_meta import LogicalWeights, Place, TensorMeta


class Homes:
    """The places of logical tensors on this rank, asked once for one state of the places."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights
        self._places: dict[str, Sequence[Place]] = {}
        self._resident_bytes: dict[int, int] | None = None

    def places(self, name: str) -> Sequence[Place]:
        """Return the places of a tensor."""
        found = self._places.get(name)
        if found is None:
            found = self._places[name] = self._weights.places(name)
        return found

    def moves(self, held: TensorMeta) -> tuple[list[Move], int] | None:
        """Return the moves of a tensor to all of its places, and how many of its dimensions are rows of their matrix.

        None where only the places themselves can write it.
        """
        places = self.places(held.name)
        found: list[Move] = []
        for place in places:
            moves = place.moves(held.shape)
            if moves is None:
                return None
            found = found + moves if found else moves
        region = places[0].region if places else None
        return found, 1 if region is None else lead_of(region.dim)

    @functools.cached_property
    def device(self) -> torch.device | None:
        """The device of the weights; None for a rank that holds none."""
        places = (place for name in self._weights.metas() for place in self.places(name))
        first = next(places, None)
        return None if first is None else first.storage.device

    def has_gaps(self, storage: torch.Tensor) -> bool:
        """Return whether the whole storage behind `storage` holds anything but content of tensors."""
        if self._resident_bytes is None:
            self._resident_bytes = {}
            for name in self._weights.metas():
                for place in self.places(name):
                    key = place.address
                    self._resident_bytes[key] = self._resident_bytes.get(key, 0) + place.num_bytes
        return self._resident_bytes.get(address_of(storage), 0) != storage.untyped_storage().nbytes()


def address_of(storage: torch.Tensor) -> int:
    """Return the address of the whole storage behind a tensor."""
    return storage.untyped_storage().data_ptr()


def bytes_of(storage: torch.Tensor) -> torch.Tensor:
    """Return the whole storage behind a tensor, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage.untyped_storage())

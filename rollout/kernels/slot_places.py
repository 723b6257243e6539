"""`SlotPlace`: the place of a tensor in one slot of stacked storage [P, ...].

Thousands of experts lie in the slots of few stacks, and in each slot of a stack in the same way.  What is the same is
asked once, of the first slot: a refresh that plans where tensors go makes no view for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rollout.kernels.places import InnerPlace, Place
from weight_sync.homes import address_of
from weight_sync.moves import Move
from weight_sync.tensor_meta import Pair, Region


class SlotStack:
    """The slots of `tensor` [P, ...].  `place(slot)`: the place in one of them, which lies in `tensor[slot]`."""

    def __init__(self, tensor: torch.Tensor, place: Callable[[int], Place]) -> None:
        self.tensor, self.place, self._first = tensor, place, place(0)
        self.region, self.num_bytes, self.address = self._first.region, self._first.num_bytes, address_of(tensor)
        self.step = tensor.stride(0) * tensor.itemsize
        self._moves: dict[tuple[Sequence[int], int | None], list[Move] | None] = {}

    def moves(self, shape: Sequence[int], lead: int | None) -> list[Move] | None:
        """Return the moves of the first slot.  The ones of another have offsets that are `step` bytes larger a slot."""
        key = shape, lead
        if key not in self._moves:
            self._moves[key] = self._first.moves(shape, lead)
        return self._moves[key]


class SlotPlace(InnerPlace):
    """The place in slot `slot` of a stack."""

    def __init__(self, stack: SlotStack, slot: int) -> None:
        self._stack, self._slot = stack, slot

    @property
    def _inner(self) -> Place:  # type: ignore[override]
        """The same place without its stack."""
        return self._stack.place(self._slot)

    @property
    def region(self) -> Region | None:  # type: ignore[override]
        return self._stack.region

    @property
    def address(self) -> int:
        return self._stack.address

    @property
    def num_bytes(self) -> int:
        return self._stack.num_bytes

    def rebind(self, storage: torch.Tensor) -> Place:
        return self._inner.rebind(storage)

    def write(self, source: torch.Tensor | Pair) -> None:
        self._inner.write(source)

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        first, by = self._stack.moves(tuple(shape), lead), self._slot * self._stack.step
        return first and [Move(kind, storage, offset + by, *rest) for kind, storage, offset, *rest in first]

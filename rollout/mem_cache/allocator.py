"""Free list of KV slots.  Knows nothing of who holds a slot."""

from __future__ import annotations

import torch


class SlotAllocator:
    """A stack of free slot numbers, preallocated.

    Every slot is at any time in exactly one place: here, in the prefix cache, or private to one request.
    """

    def __init__(self, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.num_slots = num_slots
        self._stack = torch.arange(num_slots - 1, -1, -1, dtype=torch.int64, device=device)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        return self._num_free

    def alloc(self, count: int) -> torch.Tensor:
        """`count` slots [count] int64.  The caller has checked `count <= num_free`."""
        assert 0 <= count <= self._num_free, (count, self._num_free)
        self._num_free -= count
        return self._stack[self._num_free : self._num_free + count].clone()

    def free(self, slots: torch.Tensor) -> None:
        """Take back slots [n] int64."""
        count = slots.shape[0]
        assert self._num_free + count <= self.num_slots, "more slots freed than exist"
        self._stack[self._num_free : self._num_free + count] = slots
        self._num_free += count

    def free_slots(self) -> torch.Tensor:
        """Copy of the free slots, for integrity checks."""
        return self._stack[: self._num_free].clone()

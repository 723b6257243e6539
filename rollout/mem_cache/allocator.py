"""Free list of KV slots.  Knows nothing of who holds a slot."""

from __future__ import annotations

import numpy as np
import torch


class SlotAllocator:
    """A stack of free slot numbers, preallocated, on the host; slots are handed out on `device`.

    Every slot is at any time in exactly one place: here, in the prefix cache, or private to one request.
    """

    def __init__(self, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.num_slots = num_slots
        self._device = torch.device(device)
        self._stack = np.arange(num_slots - 1, -1, -1, dtype=np.int64)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        return self._num_free

    def alloc(self, count: int) -> torch.Tensor:
        """`count` slots [count] int64.  The caller has checked `count <= num_free`."""
        assert 0 <= count <= self._num_free, (count, self._num_free)
        self._num_free -= count
        return torch.from_numpy(self._stack[self._num_free : self._num_free + count].copy()).to(self._device)

    def free(self, slots: torch.Tensor) -> None:
        """Take back slots [n] int64."""
        count = slots.shape[0]
        assert self._num_free + count <= self.num_slots, "more slots freed than exist"
        self._stack[self._num_free : self._num_free + count] = slots.cpu().numpy()
        self._num_free += count

    def free_slots(self) -> torch.Tensor:
        """Copy of the free slots, for integrity checks."""
        return torch.from_numpy(self._stack[: self._num_free].copy())

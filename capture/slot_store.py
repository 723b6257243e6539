"""`RouteSlotStore`: the rows of tokens whose KV is in the pool, by KV slot.

A row is written by the very forward that wrote the slot's KV, so a prefix hit reads the routes that made the KV it
reuses.  Knows slots and rows.  Does not know requests, trees or versions.

Shapes: T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import torch

from capture.storage import storage_dtype, storage_missing


class RouteSlotStore:
    """Host rows [num_slots, L, K]; the memory of a slot is committed when it is first written."""

    def __init__(self, num_slots: int, num_moe_layers: int, top_k: int, num_experts: int) -> None:
        self._missing = storage_missing(num_experts)
        self._rows = torch.empty((num_slots, num_moe_layers, top_k), dtype=storage_dtype(num_experts))
        self._written = torch.zeros(num_slots, dtype=torch.bool)
        # numpy writes and reads few rows in a fraction of torch's time
        self._rows_on_host, self._written_on_host = self._rows.numpy(), self._written.numpy()

    @property
    def num_slots(self) -> int:
        return self._rows.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes once every slot has been written."""
        return self._rows.nbytes + self._written.nbytes

    def write(self, slots: torch.Tensor, rows_TLK: torch.Tensor) -> None:
        """Set the rows of distinct `slots` [T] int64 to `rows_TLK`, ids of any integer type, on any device."""
        if not slots.is_cpu:
            slots, rows_TLK = slots.cpu(), rows_TLK.cpu()
        slots_on_host, rows_on_host = slots.numpy(), rows_TLK.numpy()
        assert rows_on_host.shape == (len(slots_on_host), *self._rows_on_host.shape[1:]), rows_on_host.shape
        self._rows_on_host[slots_on_host] = rows_on_host
        self._written_on_host[slots_on_host] = True

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy [T, L, K] of the rows of `slots` [T] int64; a slot without a row comes back MISSING."""
        rows_TLK = self._rows.index_select(0, slots)
        written_T = self._written[slots]
        if not bool(written_T.all()):
            rows_TLK[~written_T] = self._missing
        return rows_TLK

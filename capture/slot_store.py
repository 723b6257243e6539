"""`RouteSlotStore`: the rows of tokens whose KV is in the pool, by KV slot.

A row is written by the very forward that wrote the slot's KV, so a prefix hit reads the routes that made the KV it
reuses.

Shapes: T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import numpy as np
import torch

from capture.routed_experts import id_dtype, missing_id


class RouteSlotStore:
    """Host rows [num_slots, L, K] of `id_dtype(num_experts)`; a slot's memory is committed when it is first written."""

    def __init__(self, num_slots: int, num_moe_layers: int, top_k: int, num_experts: int) -> None:
        self._missing = missing_id(num_experts)
        self._rows = np.empty((num_slots, num_moe_layers, top_k), dtype=id_dtype(num_experts))
        self._written = np.zeros(num_slots, dtype=bool)

    @property
    def nbytes(self) -> int:
        """Bytes once every slot has been written."""
        return self._rows.nbytes + self._written.nbytes

    def write(self, slots: torch.Tensor, rows_TLK: torch.Tensor) -> None:
        """Set the rows of distinct `slots` [T] int64 to `rows_TLK`, ids of any integer type, on any device."""
        if not slots.is_cpu:
            slots, rows_TLK = slots.cpu(), rows_TLK.cpu()
        slots_on_host, rows_on_host = slots.numpy(), rows_TLK.numpy()
        assert rows_on_host.shape == (len(slots_on_host), *self._rows.shape[1:]), rows_on_host.shape
        self._rows[slots_on_host] = rows_on_host
        self._written[slots_on_host] = True

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Return a copy [T, L, K] of the rows of `slots` (int64 [T]); a slot without a row comes back MISSING."""
        rows_TLK: np.ndarray = self._rows[slots]
        written_T = self._written[slots]
        if not written_T.all():
            rows_TLK[~written_T] = self._missing
        return rows_TLK

"""`RouteSlotStore`: the rows of tokens whose KV is in the pool, by KV slot.

A row is written by the very forward that wrote the slot's KV, so a prefix hit reads the routes that made the KV it
reuses.  Knows slots and rows.  Does not know requests, trees or versions.

Writes are copied, and entered some steps later, in their order, at the latest when somebody reads: a handful of torch
calls in a row cost a fraction of the same calls after a forward that emptied the caches.

Shapes: T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import torch

from capture.storage import storage_dtype, storage_missing

_MOST_STEPS = 32
_MOST_TOKENS = 4096


class RouteSlotStore:
    """Host rows [num_slots, L, K]; the memory of a slot is committed when it is first written."""

    def __init__(self, num_slots: int, num_moe_layers: int, top_k: int, num_experts: int) -> None:
        self._missing = storage_missing(num_experts)
        self._rows = torch.empty((num_slots, num_moe_layers, top_k), dtype=storage_dtype(num_experts))
        self._written = torch.zeros(num_slots, dtype=torch.bool)
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies on the host
        self._tokens_noted = 0

    @property
    def num_slots(self) -> int:
        return self._rows.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes once every slot has been written."""
        return self._rows.nbytes + self._written.nbytes

    def write(self, slots: torch.Tensor, rows_TLK: torch.Tensor) -> None:
        """Set the rows of distinct `slots` [T] int64 to `rows_TLK`, ids of any integer type, on any device."""
        assert rows_TLK.shape == (slots.shape[0], *self._rows.shape[1:]), tuple(rows_TLK.shape)
        self._noted.append((slots.to("cpu", copy=True), rows_TLK.to("cpu", self._rows.dtype, copy=True)))
        self._tokens_noted += slots.shape[0]
        if len(self._noted) >= _MOST_STEPS or self._tokens_noted >= _MOST_TOKENS:
            self._enter_noted()

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy [T, L, K] of the rows of `slots` [T] int64; a slot without a row comes back MISSING."""
        self._enter_noted()
        rows_TLK = self._rows.index_select(0, slots)
        written_T = self._written[slots]
        if not bool(written_T.all()):
            rows_TLK[~written_T] = self._missing
        return rows_TLK

    def _enter_noted(self) -> None:
        for slots, rows_TLK in self._noted:
            self._rows.index_copy_(0, slots, rows_TLK)
            self._written.index_fill_(0, slots, True)
        self._noted, self._tokens_noted = [], 0

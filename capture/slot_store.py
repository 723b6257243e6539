"""`RouteSlotStore`: the rows of tokens whose KV is in the pool, by KV slot.

A row is written by the very forward that wrote the slot's KV, so a prefix hit reads the routes that made the KV it
reuses.  Knows slots and rows.  Does not know requests, trees or versions.

Shapes: T tokens, S rows of one request, L MoE layers, K top-k.
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

    @property
    def num_slots(self) -> int:
        return self._rows.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes once every slot has been written."""
        return self._rows.nbytes + self._written.nbytes

    def write(self, slots: torch.Tensor, rows_TLK: torch.Tensor) -> None:
        """Set the rows of distinct `slots` [T] int64, on the host."""
        assert rows_TLK.shape == (slots.shape[0], *self._rows.shape[1:]), tuple(rows_TLK.shape)
        self._rows.index_copy_(0, slots, rows_TLK)
        self._written[slots] = True

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy [T, L, K] of the rows of `slots` [T] int64; a slot without a row comes back MISSING."""
        rows_TLK = self._rows.index_select(0, slots)
        written_T = self._written[slots]
        if not bool(written_T.all()):
            rows_TLK[~written_T] = self._missing
        return rows_TLK

    def forget(self, slots: torch.Tensor) -> None:
        """From now on `slots` [T] int64 read as MISSING, until written again."""
        self._written[slots] = False

    def rows_for_request(self, slots: torch.Tensor, saved_rows: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [S, L, K] of one request: those of its `slots` in position order, under its `saved_rows`.

        `saved_rows` [N, L, K] are the rows of the request's first N positions, kept from before a retraction.  They
        win wherever they are not MISSING, because log-probabilities already handed out belong to them.
        S = max(len(slots), N): a request may be longer in its record than in the pool.
        """
        rows_SLK = self.read(slots)
        if saved_rows is None or saved_rows.shape[0] == 0:
            return rows_SLK
        kept = saved_rows.shape[0]
        present_N = saved_rows[:, 0, 0] != self._missing
        if kept > rows_SLK.shape[0]:
            tail = saved_rows[rows_SLK.shape[0] :]
            rows_SLK = torch.cat([rows_SLK, tail])
        rows_SLK[:kept][present_N] = saved_rows[present_N]
        return rows_SLK

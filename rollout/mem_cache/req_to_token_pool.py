"""Table of the KV slot of each (request row, position).  Knows nothing of requests beyond their row."""

from __future__ import annotations

import torch


class ReqToTokenPool:
    """`table` [max_requests, max_context] int64; a row belongs to one request while it holds KV."""

    def __init__(self, max_requests: int, max_context: int, device: torch.device | str = "cpu") -> None:
        # empty, not zeros: rows that are never used never take memory
        self.table = torch.empty((max_requests, max_context), dtype=torch.int64, device=device)
        self._free_rows = list(range(max_requests - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def alloc(self) -> int:
        """A free row.  The caller has checked `num_free`."""
        return self._free_rows.pop()

    def enter(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Set the slots of positions in rows, all int64 and of shapes that broadcast to that of `slots`."""
        device = self.table.device
        self.table.index_put_((rows.to(device), positions.to(device)), slots)

    def free(self, row: int) -> None:
        self._free_rows.append(row)

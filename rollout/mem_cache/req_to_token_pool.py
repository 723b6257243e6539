"""What is kept on the device by request row.  Knows nothing of requests beyond their row."""

from __future__ import annotations

import torch


class NewestTokens:
    """The token that was sampled last for each request row: the next step reads it without a detour over the host.

    What was put last is entered in the table when other rows are put or asked for, so that while the same requests
    decode, one step's tokens are the next one's as they are.
    """

    def __init__(self, max_requests: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._table = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._rows = torch.empty(0, dtype=torch.int64, device=device)
        self._tokens = self._rows

    def put(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Distinct rows [n] and a token for each; neither is changed later."""
        if rows is not self._rows:
            self._table.index_copy_(0, self._rows, self._tokens)
        self._rows, self._tokens = rows, token_ids

    def get(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of `rows` [n]; not to be changed."""
        if rows is self._rows:
            return self._tokens
        self._table.index_copy_(0, self._rows, self._tokens)
        return self._table.index_select(0, rows)


class ReqToTokenPool:
    """A row belongs to one request while it holds KV.

    `table` [max_requests, max_context] int64: the KV slot of each position.
    """

    def __init__(self, max_requests: int, max_context: int, device: torch.device | str = "cpu") -> None:
        # empty, not zeros: rows that are never used never take memory
        self.table = torch.empty((max_requests, max_context), dtype=torch.int64, device=device)
        self.newest_tokens = NewestTokens(max_requests, device)
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

"""Log-probabilities of rows of adjusted logits in plain torch.

Shapes: N rows, V vocabulary, n best tokens, C chosen tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RowLogprobs:
    """Normalises logits [N, V] once.  All values of a row that is no distribution (see `base`) are NaN."""

    def __init__(self, logits_NV: torch.Tensor) -> None:
        self._logits_NV = logits_NV
        normaliser = logits_NV.logsumexp(-1, keepdim=True)
        self.is_distribution = normaliser.isfinite().squeeze(1)  # [N]
        self._normaliser = normaliser.masked_fill(~normaliser.isfinite(), torch.nan)  # [N, 1]

    def of(self, token_ids_NC: torch.Tensor) -> torch.Tensor:
        """[N, C] of the tokens [N, C] int64."""
        return self._logits_NV.gather(1, token_ids_NC) - self._normaliser

    def of_each(self, token_ids: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """[C] of the tokens of some rows, given as (index, token ids), one row after the other."""
        device = self._logits_NV.device
        rows = torch.tensor([i for i, ids in token_ids for _ in ids], dtype=torch.int64, device=device)
        flat = torch.tensor([token for _, ids in token_ids for token in ids], dtype=torch.int64, device=device)
        return self._logits_NV[rows, flat] - self._normaliser[rows, 0]

    def best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and log-probabilities [N, n], best first; n is `count`, or V if that is less."""
        values, ids = self._logits_NV.topk(min(count, self._logits_NV.shape[1]), dim=-1)
        first = torch.arange(ids.shape[1], device=ids.device)
        return torch.where(self.is_distribution[:, None], ids, first), values - self._normaliser

"""Decode batches whose arrays go astray, for the checks that must notice."""

from __future__ import annotations

import torch

from rollout.scheduler.decode_batch import DecodeBatch


class ForgetsWhoLeft(DecodeBatch):
    """Lets requests go and keeps the first columns instead of theirs."""

    def _columns_of(self, rows: list[int]) -> torch.Tensor:
        return self._columns()[:, : len(rows)].contiguous()


class ForgetsToAdvance(DecodeBatch):
    """Takes the tokens and leaves the counters as they were."""

    def advance(self, token_ids_B: torch.Tensor) -> None:
        self.inputs.input_ids = token_ids_B

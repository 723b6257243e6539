"""Decode batches whose arrays go astray, for the checks that must notice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.scheduler.decode_batch import DecodeBatch


class ForgetsWhoLeft(DecodeBatch):
    """Lets requests go and keeps the first columns instead of theirs."""

    def _columns_of(self, rows: list[int]) -> torch.Tensor:
        return self._columns_4B[:, : len(rows)].contiguous()


class ForgetsToAdvance(DecodeBatch):
    """Leaves the counters as they were."""

    def advance(self) -> Sequence[int]:
        return ()

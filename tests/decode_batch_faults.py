"""Decode batches whose arrays go astray, for the checks that must notice."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rollout.scheduler.decode_batch import DecodeBatch


class ForgetsToMoveColumns(DecodeBatch):
    """Lets requests go and leaves the arrays as they were."""

    def keep(self, is_kept: Iterable[bool]) -> None:
        self._set_members([req for req, kept in zip(self.reqs, is_kept) if kept])


class ForgetsToAdvance(DecodeBatch):
    """Takes the tokens and leaves the counters as they were."""

    def advance(self, token_ids_B: np.ndarray) -> None:
        self._input_ids[:] = token_ids_B
        for req in self.reqs:
            req.device_len += 1

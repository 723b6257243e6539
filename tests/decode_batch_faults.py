"""Decode batches whose arrays go astray, for the checks that must notice."""

from __future__ import annotations

import torch

from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.req import Req


class ForgetsWhoLeft(DecodeBatch):
    """Lets requests go and leaves the arrays of as many rows as they were."""

    def _keep(self, reqs: list[Req]) -> None:
        old, count = self.inputs, len(reqs)
        self._set_members(reqs)
        self.inputs.input_ids, self.inputs.pool_indices = old.input_ids[:count], old.pool_indices[:count]


class ForgetsToAdvance(DecodeBatch):
    """Takes the tokens and leaves the counters as they were."""

    def advance(self, token_ids_B: torch.Tensor) -> None:
        self.inputs.input_ids = token_ids_B
        for req in self.reqs:
            req.device_len += 1

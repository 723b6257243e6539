"""Refreshes of a scheduler driven in process, whose tensors a test hands over where a transport would deliver them.

    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    trainer.refresh(harness, "v2")

Everything else is the engine's own: verbs, queue, transaction, commit, publication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from tests.loopback_updater import LoopbackSource
from tests.scheduler_harness import Harness
from weight_sync.fingerprint import fingerprint, fingerprint_hex


class LoopbackTrainer:
    """Holds the tensors of one version by wire name.  `failure` is raised where the next bucket should come."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.failure: Exception | None = None

    def source(self, verb: UpdateWeightsFromDistributedReqInput, _: Any) -> LoopbackSource:
        failure, self.failure = self.failure, None
        return LoopbackSource([(name, self.tensors[name]) for name in verb.lists()[0]], failure)

    def manifest(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "fingerprint": fingerprint_hex(fingerprint(tensor)),
            }
            for name, tensor in self.tensors.items()
        ]

    def send(
        self,
        harness: Harness,
        names: Sequence[str] | None = None,
        weight_version: str | None = None,
        update_id: str | None = None,
    ) -> ControlReqOutput:
        """Send one bucket, of all tensors by default."""
        chosen = list(self.tensors if names is None else names)
        return harness.control(
            UpdateWeightsFromDistributedReqInput,
            names=chosen,
            dtypes=[str(self.tensors[name].dtype) for name in chosen],
            shapes=[list(self.tensors[name].shape) for name in chosen],
            weight_version=weight_version,
            **({} if update_id is None else {"update_id": update_id}),
        )

    def refresh(self, harness: Harness, weight_version: str, buckets: int = 3) -> ControlReqOutput:
        """Refresh between begin and end, in buckets that cut through tensors that the model fuses."""
        begun = harness.control(BeginWeightUpdateReqInput, weight_version=weight_version)
        assert begun.success, begun.message
        names = sorted(self.tensors)
        for first in range(buckets):
            sent = self.send(harness, names[first::buckets])
            assert sent.success, sent.message
        return harness.control(EndWeightUpdateReqInput)

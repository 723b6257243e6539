"""A `WeightUpdater` to which a test hands the tensors that a process group would deliver."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_sync.process_group import GroupHandle
from weight_sync.tensor_meta import TensorMeta, dtype_name
from weight_sync.updater import WeightUpdater

Named = list[tuple[str, torch.Tensor]]


class LoopbackUpdater(WeightUpdater):
    """Takes the tensors of a bucket from `incoming` instead of a process group; `failure` is raised there."""

    incoming: Named = []
    failure: Exception | None = None

    def _group(self, group_name: str) -> GroupHandle:
        return None  # type: ignore[return-value]

    def _receive(self, group: GroupHandle, metas: Sequence[TensorMeta], load_format: str | None) -> Named:
        if self.failure is not None:
            raise self.failure
        return self.incoming

    def send(self, named: Named, weight_version: str | None = None) -> None:
        self.incoming = named
        names = [name for name, _ in named]
        dtypes = [dtype_name(tensor.dtype) for _, tensor in named]
        shapes = [list(tensor.shape) for _, tensor in named]
        self.receive_distributed(names, dtypes, shapes, "group", None, weight_version)

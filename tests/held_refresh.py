"""A model with matrices in fewer bits, new tensors for it, and a refresh that a test drives by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from rollout.kernels.ops import Ops
from tests.loopback_updater import LoopbackUpdater
from tests.model_zoo import load_tiny, logical_tensors
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import TensorMeta


def updater_of(folder: Path, ops: Ops, mode: StagingMode = "host") -> LoopbackUpdater:
    """Load a model as `ops` hold it, and return an updater of its weights, alone in its vote."""
    weights = load_tiny(folder, torch.bfloat16, ops=ops).weights
    return LoopbackUpdater(
        weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine, staging=mode, quantised=weights.held_formats()
    )


def newer(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint as a step of training may leave them."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (x + 0.05 * torch.randn(x.shape, generator=generator)).bfloat16()
        for name, x in logical_tensors(folder).items()
    }


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    return digest((TensorMeta(name, x.dtype, tuple(x.shape)), fingerprint(x)) for name, x in tensors.items())

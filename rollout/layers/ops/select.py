"""Which `LayerOps` a model gets.  The one place that knows every implementation."""

from __future__ import annotations

import torch

from rollout.layers.ops.base import LayerOps
from rollout.layers.ops.native_ops import DTYPES, NativeOps
from rollout.layers.ops.torch_ops import TorchOps


def select_ops(dtype: torch.dtype, device: torch.device | str, kernels_available: bool) -> LayerOps:
    """The compiled operators where they exist for this dtype and device, else plain torch."""
    if kernels_available and dtype in DTYPES and torch.device(device).type == "cpu":
        return NativeOps()
    return TorchOps()

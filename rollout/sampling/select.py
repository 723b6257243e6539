"""Which `Sampler` an engine gets.  The one place that knows every implementation."""

from __future__ import annotations

import torch

from rollout.sampling.base import Sampler
from rollout.sampling.native_sampler import DTYPES, NativeSampler
from rollout.sampling.torch_sampler import TorchSampler


def select_sampler(dtype: torch.dtype, device: torch.device | str, kernels_available: bool) -> Sampler:
    """The compiled operators where they exist for logits of this dtype, else plain torch."""
    if kernels_available and dtype in DTYPES and torch.device(device).type == "cpu":
        return NativeSampler()
    return TorchSampler()

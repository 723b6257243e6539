"""Which `Sampler` an engine gets.  The one place that knows every implementation."""

from __future__ import annotations

import torch

from rollout.sampling.base import Sampler
from rollout.sampling.native_sampler import NativeSampler
from rollout.sampling.torch_sampler import TorchSampler


def select_sampler(dtype: torch.dtype, device: torch.device | str, kernels_available: bool) -> Sampler:
    """The compiled operators where they exist for the logits of a model of this dtype, else plain torch.

    Logits are float64 for a float64 model, else float32 or bfloat16.
    """
    if kernels_available and dtype != torch.float64 and torch.device(device).type == "cpu":
        return NativeSampler()
    return TorchSampler()

"""`Build`: the operators, dtype, device and ranks that every layer of a model is built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.distributed.parallel import Parallel
from rollout.kernels.ops import Ops


@dataclass(frozen=True)
class Build:
    """Operators, dtype and device of a model, and this rank's view of the others."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device | str
    parallel: Parallel

    def empty(self, *shape: int) -> torch.Tensor:
        """Make a plain tensor of the model's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_matrix(self, out_features: int, in_features: int) -> torch.Tensor:
        """Make a matrix [out_features, in_features] as the operators store it."""
        return self.ops.storage.empty_matrix(out_features, in_features, self.dtype, self.device)

"""`sum_in_order`: the sum [...] of the parts [N, ...] of N ranks, added one after the other from the first on.

The sum runs in float32 (float64 for float64) and is rounded once, so every element has the same bits in every batch.
"""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator


@operator("(Tensor parts) -> Tensor", Gradient(flows=("parts",)))
def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(parts.dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)

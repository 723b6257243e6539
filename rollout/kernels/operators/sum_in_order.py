"""`sum_in_order`: the sum [...] of the parts [N, ...] of N ranks, added one after the other from the first on.

Sums of bfloat16 and float16 run in float32 and are rounded once; other dtypes, integers too, are summed as they are.
So every element has the same bits in every batch.
"""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator


@operator("(Tensor parts) -> Tensor", Gradient(flows=("parts",)))
def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    wide = torch.float32 if parts.dtype in (torch.bfloat16, torch.float16) else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)

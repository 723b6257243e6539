"""`add_gated`: hidden + added * sigmoid(gate) [T, D], of terms [T, D] and a gate [T, 1] whose sigmoid is rounded.

Without a gate it is the sum.  Product and sum are rounded together, once.  The compiled float32 result is within one
unit in the last place of the terms: its sigmoid differs from torch's.
"""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator


@operator(
    "(Tensor hidden, Tensor added, Tensor? gate=None) -> Tensor",
    Gradient(flows=("hidden", "added", "gate")),
)
def add_gated(hidden: torch.Tensor, added: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    return hidden + added if gate is None else torch.addcmul(hidden, added, gate.sigmoid())

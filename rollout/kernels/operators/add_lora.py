"""`add_lora`: out + (hidden @ A) @ B [T, O], where each token has the A and B of its adapter, or none.

`slots` [T] int64 is the adapter of each token, -1 for none.  `a` [S, P, D, R] and `b` [S, R, O] hold S adapters of P
parts: part p makes the columns `columns[p] .. columns[p + 1] - 1` of the result.  `ranks` [S, P] int64 counts the
columns of A and rows of B that a part has; the others are not read.  The scale of an adapter is in B (Hu et al., 2021).

For bfloat16 and float16 the product with A stays in float32, and the sum with `out` is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from rollout.kernels.operator import Gradient, operator


@operator(
    "(Tensor out, Tensor hidden, Tensor slots, Tensor a, Tensor b, Tensor ranks, int[] columns) -> Tensor",
    Gradient(flows=("out", "hidden"), weights=("a", "b"), copied=("ranks",)),
)
def add_lora(
    out: torch.Tensor,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    columns: Sequence[int],
) -> torch.Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    x_TD, total_TO = hidden.to(wide), out.to(wide)
    counts_SPR = torch.arange(a.shape[3], device=a.device) < ranks.unsqueeze(2)
    for slot in range(a.shape[0]):
        deltas = [
            (x_TD @ a[slot, part].to(wide)).masked_fill(~counts_SPR[slot, part], 0.0) @ b[slot, :, first:end].to(wide)
            for part, (first, end) in enumerate(pairwise(columns))
        ]
        total_TO = torch.where((slots == slot).unsqueeze(1), total_TO + torch.cat(deltas, dim=1), total_TO)
    return total_TO.to(out.dtype)

"""`gather_rows`: rows of a plain table [N, ...] by number [T].  Raises `IndexError`."""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator


@operator("(Tensor table, Tensor ids) -> Tensor", Gradient(weights=("table",), looks_up=True))
def gather_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, ids)

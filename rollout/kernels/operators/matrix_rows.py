"""`matrix_rows`: rows of a stored matrix of `depth` columns by number [T]."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.kernels.operator import Gradient, operator


@operator("(Tensor weight, Tensor ids, int depth) -> Tensor", Gradient(weights=("weight",), looks_up=True))
def matrix_rows(weight: torch.Tensor, ids: torch.Tensor, depth: int) -> torch.Tensor:
    return F.embedding(ids, weight)

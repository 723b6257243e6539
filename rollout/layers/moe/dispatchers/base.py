"""The interface between routing and the experts: bring each token to the ranks of its experts, and the results back.

A dispatcher holds no parameters and is not a module.  What `combine` needs to remember travels in a handle that only
the same dispatcher reads.

Shapes: T tokens of this rank, D hidden, K top-k, R rows that the experts of this rank work on, S expert slots of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class DispatchOutput:
    """Work for the experts of this rank."""

    hidden_RD: torch.Tensor
    local_physical_ids_RS: torch.Tensor  # int64, index into this rank's expert storage
    handle: Any  # opaque: read by the dispatcher that made it


class Dispatcher(ABC):
    """`combine` sums a token's expert outputs in the order of its K choices, whatever the dispatcher."""

    @abstractmethod
    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DispatchOutput:
        """Send tokens to the ranks that hold their experts."""

    @abstractmethod
    def combine(self, expert_out_RSD: torch.Tensor, handle: Any) -> torch.Tensor:
        """Bring the unweighted expert outputs back and return their weighted sum [T, D]."""


def weighted_sum(expert_out_TKD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Sum over K in slot order, products rounded to the dtype of the hidden states as in transformers."""
    return (expert_out_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)

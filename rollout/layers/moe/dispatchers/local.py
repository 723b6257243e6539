"""All experts are on this rank: nothing moves.  The reference for every other dispatcher.

Shapes: T tokens, D hidden, K top-k.
"""

from __future__ import annotations

import torch

from rollout.layers.moe.dispatchers.base import Dispatcher, DispatchOutput, weighted_sum


class LocalDispatcher(Dispatcher):
    """Rows are the tokens, a row's slots are its K choices, and the handle is the weights [T, K]."""

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DispatchOutput:
        return DispatchOutput(hidden_TD, physical_ids_TK, handle=weights_TK)

    def combine(self, expert_out_RSD: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        return weighted_sum(expert_out_RSD, handle)

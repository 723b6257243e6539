"""All experts are on this rank: nothing moves.  The reference for every other dispatcher.

Shapes: T tokens, D hidden, K top-k.
"""

from __future__ import annotations

import torch

from rollout.layers.moe.dispatchers.base import Dispatcher, DispatchOutput


class LocalDispatcher(Dispatcher):
    """Rows are the tokens, a row's slots its K choices, and the experts do the sum: there is nothing to remember."""

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DispatchOutput:
        return DispatchOutput(hidden_TD, physical_ids_TK, weights_TK, handle=None)

    def combine(self, expert_out: torch.Tensor, handle: None) -> torch.Tensor:
        return expert_out

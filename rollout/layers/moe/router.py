"""The router of one MoE layer: the only place where experts are chosen, in one order.

    score -> hooks see logical ids -> logical to physical

Shapes: T tokens, D hidden, E logical experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eplb.placement import ExpertPlacement
from rollout.layers.context import RouteHook
from rollout.layers.ops.base import LayerOps
from rollout.layers.weight_entry import SingleWeightLayer, empty_parameter


class TopKRouter(SingleWeightLayer):
    """Weight [E, D].  `moe_layer` is the layer's ordinal among the MoE layers."""

    def __init__(
        self,
        moe_layer: int,
        hidden_size: int,
        num_logical_experts: int,
        top_k: int,
        normalise: bool,
        placement: ExpertPlacement,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.moe_layer = moe_layer
        self.top_k = top_k
        self.normalise = normalise
        self.placement = placement
        self.weight = empty_parameter(num_logical_experts, hidden_size, dtype=dtype, device=device)

    def forward(self, hidden_TD: torch.Tensor, hooks: Sequence[RouteHook]) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, K] in the dtype of the hidden states and physical expert ids [T, K] int64."""
        logits_TE = self.ops.linear(hidden_TD, self.weight)
        weights_TK, logical_ids_TK = self.ops.softmax_topk(logits_TE, self.top_k, self.normalise)
        for hook in hooks:
            hook(self.moe_layer, logical_ids_TK)
        return weights_TK, self.placement.logical_to_physical(self.moe_layer, logical_ids_TK)

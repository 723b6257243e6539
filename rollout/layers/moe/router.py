"""The router of one MoE layer: the only place where experts are chosen, in one order.

    norm -> score -> hooks see logical ids -> logical to physical

Shapes: T tokens, D hidden, E logical experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from eplb.placement import ExpertPlacement
from rollout.layers.context import RouteHook
from rollout.layers.linear import matrix_entry
from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.ops.base import LayerOps
from rollout.layers.weight_entry import WeightEntry, WeightLayer


class TopKRouter(WeightLayer):
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
        self.ops = ops
        self.moe_layer = moe_layer
        self.hidden_size, self.num_logical_experts = hidden_size, num_logical_experts
        self.top_k = top_k
        self.normalise = normalise
        self.placement = placement
        self.weight = ops.empty_matrix(num_logical_experts, hidden_size, dtype, device)

    def __call__(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor, norm: RMSNorm, hooks: Sequence[RouteHook]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The norm of `residual += hidden` [T, D]; weights [T, K] in its dtype and physical expert ids [T, K] int64."""
        normed_TD, weights_TK, logical_ids_TK = self.ops.norm_route(
            residual_TD,
            hidden_TD,
            norm.weight,
            norm.eps,
            self.weight,
            self.num_logical_experts,
            self.top_k,
            self.normalise,
        )
        self.show(logical_ids_TK, hooks)
        return normed_TD, weights_TK, self.placement.logical_to_physical(self.moe_layer, logical_ids_TK)

    def show(self, logical_ids_TK: torch.Tensor, hooks: Sequence[RouteHook]) -> None:
        """Tell the hooks what was chosen."""
        for hook in hooks:
            hook(self.moe_layer, logical_ids_TK)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        rows = range(self.num_logical_experts)
        yield matrix_entry(self.ops, f"{prefix}.weight", self.weight, rows, self.hidden_size)

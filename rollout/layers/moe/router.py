"""The router of one MoE layer: the only place where experts are chosen, in one order.

    norm -> score -> hooks see logical ids -> logical to physical

Shapes: T tokens, D hidden, E logical experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from eplb.placement import ExpertPlacement
from rollout.layers.context import RouteHook
from rollout.layers.linear import row_entry
from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.ops.base import LayerOps
from rollout.layers.shard import Shard
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
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor,
        norm: RMSNorm,
        hooks: Sequence[RouteHook],
        first_row: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The norm of `residual += hidden` [T, D]; weights [T, K] in its dtype and physical expert ids [T, K] int64.

        The tokens are the rows `first_row ..` of the batch.
        """
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
        physical_ids_TK = self.placement.logical_to_physical(self.moe_layer, logical_ids_TK, first_row)
        return normed_TD, weights_TK, physical_ids_TK

    def show(self, logical_ids_TK: torch.Tensor, hooks: Sequence[RouteHook]) -> None:
        """Tell the hooks what was chosen."""
        for hook in hooks:
            hook(self.moe_layer, logical_ids_TK)

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        place = self.ops.matrix_place(self.weight, range(self.num_logical_experts), self.hidden_size)
        rows = Shard.whole(self.num_logical_experts)
        yield row_entry(f"{prefix}.weight", self.weight, place, rows, self.hidden_size)

"""The router of one MoE layer: the only place where experts are chosen, on every path in one order.

    norm -> score -> choose, or take replayed choices -> hooks see logical ids -> logical to physical

Shapes: T tokens, D hidden, E logical experts, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from eplb.placement import ExpertPlacement
from rollout.core.forward_batch import ForwardBatch
from rollout.core.specs.layer_specs import RouterSpec
from rollout.kernels.operators.norm_route import RouterRule
from rollout.kernels.places import ViewPlace
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext, RouteHook
from rollout.layers.linear import row_entry, sharded_entry
from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.shard import Shard
from rollout.layers.weight_entry import WeightEntry, WeightLayer


class TopKRouter(WeightLayer):
    """The router with its weight [E, D] and, where the spec has them, a bias [E] and the correction bias float32 [E].

    `moe_layer` is the layer's ordinal among the MoE layers.
    """

    def __init__(
        self, spec: RouterSpec, hidden_size: int, moe_layer: int, placement: ExpertPlacement, build: Build
    ) -> None:
        self.ops = build.ops
        self.moe_layer = moe_layer
        self.placement = placement
        self.hidden_size, self.num_logical_experts, self.top_k = hidden_size, spec.num_experts, spec.top_k
        self.weight = build.empty_matrix(spec.num_experts, hidden_size)
        self.name = spec.name
        self.bias = build.empty(spec.num_experts) if spec.bias else None
        self.correction_bias: torch.Tensor | None = None
        if spec.correction_bias:
            self.correction_bias = torch.empty(spec.num_experts, dtype=torch.float32, device=build.device)
        best = (spec.num_experts, spec.top_k, spec.normalise, spec.scoring, spec.scaling)
        self._rule = RouterRule(*best, spec.num_groups, spec.top_groups)

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor,
        norm: RMSNorm,
        context: ForwardContext,
        first_row: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose experts for the norm of `residual += hidden`, of tokens that are rows `first_row ..` of the batch.

        Returns the norm [T, D], weights [T, K] in its dtype, and physical expert ids [T, K] int64.
        """
        forced_TK = self._forced(context.batch, first_row, residual_TD.shape[0])
        normed_TD, weights_TK, logical_ids_TK = self.ops.norm_route(
            residual_TD,
            hidden_TD,
            norm.weight,
            norm.eps,
            self.weight,
            self._rule,
            self.correction_bias,
            forced_TK,
            norm.weight_offset,
            self.bias,
        )
        self.show(logical_ids_TK, context.route_hooks)
        physical_ids_TK = self.placement.logical_to_physical(self.moe_layer, logical_ids_TK, first_row)
        return normed_TD, weights_TK, physical_ids_TK

    def show(self, logical_ids_TK: torch.Tensor, hooks: Sequence[RouteHook]) -> None:
        """Call the hooks with the chosen experts."""
        for hook in hooks:
            hook(self.moe_layer, logical_ids_TK)

    def _forced(self, batch: ForwardBatch, first_row: int, num_rows: int) -> torch.Tensor | None:
        if batch.forced_routes is None:
            return None
        forced_TK = batch.forced_routes[self.moe_layer]
        if num_rows == batch.num_tokens:
            return forced_TK
        return forced_TK[first_row : first_row + num_rows]

    def weight_entries(self, prefix: str) -> Iterator[WeightEntry]:
        prefix = f"{prefix.rpartition('.')[0]}.{self.name}"
        experts = Shard.whole(self.num_logical_experts)
        place = self.ops.storage.matrix_place(self.weight, range(experts.total), self.hidden_size)
        yield row_entry(f"{prefix}.weight", self.weight, place, experts, self.hidden_size)
        for name, bias in (("bias", self.bias), ("e_score_correction_bias", self.correction_bias)):
            if bias is not None:
                yield sharded_entry(f"{prefix}.{name}", bias, ViewPlace(bias), (experts.total,), 0, experts)

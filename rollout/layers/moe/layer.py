"""The sparse feed-forward block of a decoder layer: router, dispatcher, experts, in that order.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

import torch

from eplb.placement import ExpertPlacement
from rollout.core.model_config import ModelConfig
from rollout.layers.context import ForwardContext
from rollout.layers.layer import Layer
from rollout.layers.moe.dispatchers.base import Dispatcher
from rollout.layers.moe.dispatchers.local import LocalDispatcher
from rollout.layers.moe.experts import Experts
from rollout.layers.moe.router import TopKRouter
from rollout.layers.norm_rotary import RMSNorm
from rollout.layers.ops.base import LayerOps, SparseWeights


class MoELayer(Layer):
    """`moe_layer` is the layer's ordinal among the MoE layers, which is also its row in the placement."""

    def __init__(
        self,
        config: ModelConfig,
        moe_layer: int,
        placement: ExpertPlacement,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self.gate = TopKRouter(
            moe_layer,
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            placement,
            dtype,
            device,
            ops,
        )
        self.experts = Experts(config, moe_layer, placement, dtype, device, ops)
        self.dispatcher = dispatcher or LocalDispatcher()
        self.placement, self.moe_layer = placement, moe_layer

    def local_weights(self, norm: RMSNorm) -> SparseWeights | None:
        """What the block computes with after `norm`, if no token leaves this rank."""
        if not isinstance(self.dispatcher, LocalDispatcher):
            return None
        gate, experts = self.gate, self.experts
        return SparseWeights(
            norm=norm.weight,
            eps=norm.eps,
            router=gate.weight,
            num_logical_experts=gate.num_logical_experts,
            top_k=gate.top_k,
            normalise=gate.normalise,
            w13=experts.w13,
            w2=experts.w2,
            inner=experts.intermediate_size,
        )

    def __call__(
        self, residual_TD: torch.Tensor, hidden_TD: torch.Tensor, norm: RMSNorm, context: ForwardContext
    ) -> torch.Tensor:
        """Of the norm of `residual += hidden`."""
        hidden_TD, weights_TK, physical_ids_TK = self.gate(residual_TD, hidden_TD, norm, context.route_hooks)
        work = self.dispatcher.dispatch(hidden_TD, physical_ids_TK, weights_TK)
        return self.dispatcher.combine(self.experts(work), work.handle)

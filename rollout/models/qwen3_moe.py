"""Qwen3-MoE (`Qwen3MoeForCausalLM`).  Numerics as in transformers `models/qwen3_moe`."""

from __future__ import annotations

import torch

from eplb.placement import ExpertPlacement
from rollout.core.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.layers.mlp import DenseMLP
from rollout.layers.moe.dispatchers.select import DispatcherNeeds, MoeBackend, select_dispatcher
from rollout.layers.moe.layer import MoELayer
from rollout.layers.ops.base import LayerOps
from rollout.models.decoder import DecoderForCausalLM


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Layers in `config.moe_layer_ids` are sparse, the others dense.

    `placement` has a row for each MoE layer and is shared by routers and weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        placement: ExpertPlacement,
        ops: LayerOps,
        parallel: Parallel | None = None,
        moe_backend: MoeBackend | None = None,
    ) -> None:
        parallel = parallel or Parallel()
        needs = DispatcherNeeds(
            parallel=parallel,
            backend=moe_backend or MoeBackend(),
            num_physical_experts=placement.num_physical_experts,
            hidden_size=config.hidden_size,
            top_k=config.num_experts_per_tok,
            dtype=dtype,
            device=torch.device(device),
        )
        dispatcher = select_dispatcher(needs)
        moe_layers = {layer_id: ordinal for ordinal, layer_id in enumerate(config.moe_layer_ids)}

        def make_mlp(layer_id: int) -> DenseMLP | MoELayer:
            if layer_id in moe_layers:
                return MoELayer(config, moe_layers[layer_id], placement, dtype, device, ops, parallel, dispatcher)
            return DenseMLP(config, dtype, device, ops, parallel)

        super().__init__(config, make_mlp, dtype, device, ops, parallel, dispatcher)

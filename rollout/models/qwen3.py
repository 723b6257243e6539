"""Qwen3, dense (`Qwen3ForCausalLM`).  Numerics as in transformers `models/qwen3`."""

from __future__ import annotations

import torch

from eplb.placement import ExpertPlacement
from rollout.core.model_config import ModelConfig
from rollout.layers.mlp import DenseMLP
from rollout.layers.ops.base import LayerOps
from rollout.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Every layer has a dense feed-forward block; `placement` has no layers and is not read."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        placement: ExpertPlacement,
        ops: LayerOps,
    ) -> None:
        def make_mlp(layer_id: int) -> DenseMLP:
            return DenseMLP(config.hidden_size, config.intermediate_size, dtype, device, ops)

        super().__init__(config, make_mlp, dtype, device, ops)

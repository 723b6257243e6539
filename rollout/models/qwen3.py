"""Qwen3, dense (`Qwen3ForCausalLM`).  Numerics as in transformers `models/qwen3`."""

from __future__ import annotations

import torch

from eplb.placement import ExpertPlacement
from rollout.core.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.layers.mlp import DenseMLP
from rollout.layers.moe.dispatchers.local import LocalDispatcher
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.layers.ops.base import LayerOps
from rollout.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Every layer has a dense feed-forward block; `placement` has no layers, and no token looks for an expert."""

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

        def make_mlp(layer_id: int) -> DenseMLP:
            return DenseMLP(config, dtype, device, ops, parallel)

        super().__init__(config, make_mlp, dtype, device, ops, parallel, LocalDispatcher())

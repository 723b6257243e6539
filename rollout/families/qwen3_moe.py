"""Qwen3-MoE (`Qwen3MoeForCausalLM`).  Numerics as in transformers `models/qwen3_moe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.specs.layer_specs import DenseSpec, LayerSpec, MoESpec, RouterSpec
from rollout.core.specs.model_config import ModelConfig, common_fields
from rollout.families.qwen3 import attention_of


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a Qwen3-MoE model: Qwen3 with experts in the layers that `mlps_of` chooses."""
    router = RouterSpec(
        num_experts=int(raw["num_experts"]),
        top_k=int(raw["num_experts_per_tok"]),
        normalise=bool(raw.get("norm_topk_prob", False)),
    )
    attention, sparse = attention_of(raw), MoESpec(router=router, inner=int(raw["moe_intermediate_size"]))
    layers = tuple(LayerSpec(attention=attention, mlp=mlp) for mlp in mlps_of(raw, sparse))
    return ModelConfig(**common_fields(raw, generation), layers=layers)


def mlps_of(raw: Mapping[str, Any], sparse: MoESpec) -> list[DenseSpec | MoESpec]:
    """Return the feed-forward block of each layer, as every Qwen with `decoder_sparse_step` chooses it.

    Each `decoder_sparse_step`-th layer that is not in `mlp_only_layers` is `sparse`, if there are experts.
    """
    dense = DenseSpec(inner=int(raw["intermediate_size"]))
    only_dense, step = set(raw.get("mlp_only_layers") or []), int(raw.get("decoder_sparse_step") or 1)
    has_experts = sparse.router.num_experts > 0
    return [
        sparse if has_experts and index not in only_dense and (index + 1) % step == 0 else dense
        for index in range(int(raw["num_hidden_layers"]))
    ]

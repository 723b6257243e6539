"""Qwen3-MoE (`Qwen3MoeForCausalLM`).  Numerics as in transformers `models/qwen3_moe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.specs.layer_specs import DenseSpec, LayerSpec, MoESpec, RouterSpec
from rollout.core.specs.model_config import ModelConfig, common_fields
from rollout.families.qwen3 import attention_of


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Qwen3 with experts in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    experts = int(raw["num_experts"])
    router = RouterSpec(
        num_experts=experts,
        top_k=int(raw["num_experts_per_tok"]),
        normalise=bool(raw.get("norm_topk_prob", False)),
    )
    attention = attention_of(raw)
    sparse = LayerSpec(attention=attention, mlp=MoESpec(router=router, inner=int(raw["moe_intermediate_size"])))
    dense = LayerSpec(attention=attention, mlp=DenseSpec(inner=int(raw["intermediate_size"])))
    only_dense, step = set(raw.get("mlp_only_layers") or []), int(raw.get("decoder_sparse_step", 1))
    layers = tuple(
        sparse if index not in only_dense and experts > 0 and (index + 1) % step == 0 else dense
        for index in range(int(raw["num_hidden_layers"]))
    )
    return ModelConfig(**common_fields(raw, generation), layers=layers)

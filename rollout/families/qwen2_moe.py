"""Qwen2-MoE and Qwen1.5-MoE (`Qwen2MoeForCausalLM`).  Numerics as in transformers `models/qwen2_moe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.specs.layer_specs import AttentionSpec, LayerSpec
from rollout.core.specs.model_config import ModelConfig, common_fields, heads_of, refuse_windows
from rollout.families.qwen3_moe import mlps_of
from rollout.families.qwen3_next import experts_of


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a Qwen2-MoE model: attention as in Qwen2, experts as in Qwen3-Next.

    The layers with experts are chosen as in Qwen3-MoE; the shared expert has a gate.
    """
    refuse_windows(raw)
    attention = AttentionSpec(**heads_of(raw), qkv_bias=bool(raw.get("qkv_bias", True)))
    sparse = experts_of(raw, normalise=bool(raw.get("norm_topk_prob", False)))
    layers = tuple(LayerSpec(attention=attention, mlp=mlp) for mlp in mlps_of(raw, sparse))
    return ModelConfig(**common_fields(raw, generation), layers=layers)

"""Qwen2 and Qwen2.5, dense (`Qwen2ForCausalLM`).  Numerics as in transformers `models/qwen2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.specs.layer_specs import AttentionSpec, DenseSpec, LayerSpec
from rollout.core.specs.model_config import ModelConfig, common_fields, heads_of, refuse_windows


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a Qwen2 model.  Queries, keys and values have biases, which no setting mentions."""
    refuse_windows(raw)
    attention = AttentionSpec(**heads_of(raw), qkv_bias=True)
    layer = LayerSpec(attention=attention, mlp=DenseSpec(inner=int(raw["intermediate_size"])))
    return ModelConfig(**common_fields(raw, generation), layers=(layer,) * int(raw["num_hidden_layers"]))

"""Llama 3 (`LlamaForCausalLM`).  Numerics as in transformers `models/llama`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.specs.layer_specs import AttentionSpec, DenseSpec, LayerSpec
from rollout.core.specs.model_config import ModelConfig, common_fields, heads_of, refuse, refuse_windows


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a Llama model: no biases and no QK norm; the rotation may be scaled."""
    refuse_windows(raw)
    refuse({name: bool(raw.get(name)) for name in ("attention_bias", "mlp_bias")})
    attention = AttentionSpec(**heads_of(raw))
    layer = LayerSpec(attention=attention, mlp=DenseSpec(inner=int(raw["intermediate_size"])))
    return ModelConfig(**common_fields(raw, generation), layers=(layer,) * int(raw["num_hidden_layers"]))

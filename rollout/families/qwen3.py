"""Qwen3, dense (`Qwen3ForCausalLM`).  Numerics as in transformers `models/qwen3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.specs.layer_specs import AttentionSpec, DenseSpec, LayerSpec
from rollout.core.specs.model_config import ModelConfig, common_fields, heads_of, refuse, refuse_windows


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a Qwen3 model: equal layers, whose attention has QK norm and no biases."""
    layer = LayerSpec(
        attention=attention_of(raw, default_head_dim=128), mlp=DenseSpec(inner=int(raw["intermediate_size"]))
    )
    return ModelConfig(**common_fields(raw, generation), layers=(layer,) * int(raw["num_hidden_layers"]))


def attention_of(raw: Mapping[str, Any], default_head_dim: int | None = None) -> AttentionSpec:
    """Return the attention of every layer.  Raises `StartupError` for windows and biases."""
    refuse_windows(raw)
    refuse({"attention_bias": bool(raw.get("attention_bias"))})
    return AttentionSpec(**heads_of(raw, default_head_dim=default_head_dim), qk_norm=True)

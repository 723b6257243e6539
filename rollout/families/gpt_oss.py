"""GPT-OSS (`GptOssForCausalLM`).  Numerics as in transformers `models/gpt_oss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.core.specs.config_json import RotaryDefaults, Settings
from rollout.core.specs.layer_specs import AttentionSpec, ClampedSwiGLU, LayerSpec, MoESpec, RouterSpec
from rollout.core.specs.model_config import ModelConfig, common_fields, heads_of, refuse

# transformers' scaling for a configuration without `rope_parameters`.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ROTARY = RotaryDefaults(theta=150000.0, scaling=_YARN)
_KINDS = ("sliding_attention", "full_attention")


def parse(raw: Settings, generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a GPT-OSS model: attention with sinks, and experts with biases, in every layer.

    Every other layer attends over a window.  Keys that published checkpoints lack have transformers' defaults.
    """
    num_layers, bias = int(raw["num_hidden_layers"]), bool(raw.get("attention_bias", True))
    full = AttentionSpec(**heads_of(raw, default_head_dim=64), qkv_bias=bias, o_bias=bias, sinks=True)
    router = RouterSpec(
        num_experts=int(raw["num_experts"]),
        top_k=int(raw["num_experts_per_tok"]),
        scoring="softmax_of_chosen",
        bias=True,
        name="router",
    )
    experts = MoESpec(
        router=router,
        inner=int(raw["intermediate_size"]),
        activation=ClampedSwiGLU(
            limit=float(raw.get("swiglu_limit", 7.0)), alpha=float(raw.get("swiglu_alpha", 1.702))
        ),
        bias=True,
        fused="interleaved",
    )
    kinds = raw.get("layer_types") or [_KINDS[index % 2] for index in range(num_layers)]
    refuse({f"layer type {kind!r}": kind not in _KINDS for kind in kinds})
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {num_layers}")
    size = raw.get("sliding_window", 128)
    if "sliding_attention" in kinds and (not isinstance(size, int) or size < 1):
        raise ValueError(f"sliding_window must be at least 1, got {size}")
    windows = {"sliding_attention": size, "full_attention": None}
    layers = [LayerSpec(attention=replace(full, window=windows[kind]), mlp=experts) for kind in kinds]
    common = common_fields(raw.defaulting(rms_norm_eps=1e-5), generation, states_extended_context=True)
    common["norm"] = replace(common["norm"], weight_offset=0.0)
    return ModelConfig(**common, layers=tuple(layers))

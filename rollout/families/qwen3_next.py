"""Qwen3-Next (`Qwen3NextForCausalLM`).  Numerics as in transformers `models/qwen3_next`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.core.specs.config_json import RotaryDefaults
from rollout.core.specs.layer_specs import (
    AttentionKind,
    AttentionSpec,
    DenseSpec,
    GatedDeltaSpec,
    LayerSpec,
    MoESpec,
    RouterSpec,
)
from rollout.core.specs.model_config import ModelConfig, common_fields, heads_of, refuse, warn_of_unused
from rollout.core.specs.mtp import MtpSpec, mtp_apart
from rollout.families.qwen3_moe import mlps_of

ROTARY = RotaryDefaults(partial=0.25)


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a Qwen3-Next model: mostly gated delta layers, experts chosen as in Qwen3-MoE.

    The model is without the layer that predicts several tokens at once, which may draft for it.
    """
    mlps = mlps_of(raw, experts_of(raw, normalise=bool(raw.get("norm_topk_prob", True))))
    mixers = mixers_of(raw, merged_by_key_head=True)
    layers = tuple(LayerSpec(attention=attention, mlp=mlp) for attention, mlp in zip(mixers, mlps, strict=True))
    mtp = mtp_of(raw, mlps[0]) if int(raw.get("num_nextn_predict_layers", 1)) else None
    return ModelConfig(**hybrid_fields(raw, generation), layers=layers, ignored_names=("mtp.",), mtp=mtp)


def mtp_of(raw: Mapping[str, Any], mlp: DenseSpec | MoESpec) -> MtpSpec:
    """Return the layer that predicts one token further: attention behind a gate, and the block of the first layer."""
    return mtp_apart(LayerSpec(attention=attention_of(raw), mlp=mlp))


def hybrid_fields(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common fields, with norms that multiply by one plus their weight."""
    fields = common_fields(raw, generation)
    return {**fields, "norm": replace(fields["norm"], weight_offset=1.0)}


def experts_of(raw: Mapping[str, Any], *, normalise: bool) -> MoESpec:
    """Return the MoE block: a softmax router, experts, and a shared expert behind a gate."""
    router = RouterSpec(
        num_experts=int(raw["num_experts"]),
        top_k=int(raw["num_experts_per_tok"]),
        normalise=normalise,
    )
    return MoESpec(
        router=router,
        inner=int(raw["moe_intermediate_size"]),
        shared_inner=int(raw["shared_expert_intermediate_size"]),
        shared_gate=True,
        shared_name="shared_expert",
    )


def attention_of(raw: Mapping[str, Any]) -> AttentionSpec:
    """Return the attention behind a gate.  Raises `StartupError` for biases."""
    refuse({"attention_bias": bool(raw.get("attention_bias"))})
    heads = heads_of(raw, default_head_dim=256, partly_rotated=True)
    return AttentionSpec(**heads, qk_norm=True, output_gate=True)


def mixers_of(raw: Mapping[str, Any], *, merged_by_key_head: bool) -> list[AttentionKind]:
    """Return the mixer of tokens of each layer: attention behind a gate, or the gated delta rule.

    Attention is in every `full_attention_interval`-th layer, or in the layers that `layer_types` names.
    """
    attention = attention_of(raw)
    delta = GatedDeltaSpec(
        num_key_heads=int(raw["linear_num_key_heads"]),
        num_value_heads=int(raw["linear_num_value_heads"]),
        key_dim=int(raw["linear_key_head_dim"]),
        value_dim=int(raw["linear_value_head_dim"]),
        conv_size=int(raw["linear_conv_kernel_dim"]),
        merged_by_key_head=merged_by_key_head,
    )
    refuse({f"linear_conv_kernel_dim {delta.conv_size}": not 1 < delta.conv_size <= 8})
    if delta.num_value_heads % delta.num_key_heads:
        raise ValueError(
            f"{delta.num_value_heads} linear value heads are not a multiple of {delta.num_key_heads} key heads"
        )
    num_layers, interval = int(raw["num_hidden_layers"]), int(raw.get("full_attention_interval") or 4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    kinds: dict[str, AttentionKind] = {"linear_attention": delta, "full_attention": attention}
    names = raw.get("layer_types") or default
    refuse({f"layer type {name!r}": name not in kinds for name in names})
    if len(names) != num_layers:
        raise ValueError(f"layer_types has {len(names)} entries, but num_hidden_layers is {num_layers}")
    warn_of_unused(raw, "full_attention_interval", "layer_types", list(names) == default)
    return [kinds[name] for name in names]

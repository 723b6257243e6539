"""GLM-4.5, 4.6 and 4.7 (`Glm4MoeForCausalLM`).  Numerics as in transformers `models/glm4_moe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.specs.config_json import RotaryDefaults, Settings
from rollout.core.specs.layer_specs import AttentionSpec, DenseSpec, LayerSpec, MoESpec, RouterSpec
from rollout.core.specs.model_config import ModelConfig, common_fields, heads_of, refuse_other_mlps, refuse_windows
from rollout.core.specs.mtp import mtp_behind

ROTARY = RotaryDefaults(partial=0.5)


def parse(raw: Settings, generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a GLM-4 MoE model: dense layers first, then layers with experts.

    Routers are sigmoid with a correction bias, and a layer with experts has a shared one.  Half of a head is rotated.
    Layers behind the last hidden one predict several tokens at once: the model is without them, and the first of them
    may draft for it.
    """
    refuse_windows(raw)
    attention = AttentionSpec(
        **heads_of(raw, partly_rotated=True),
        qk_norm=bool(raw.get("use_qk_norm")),
        qkv_bias=bool(raw.get("attention_bias")),
    )
    router = RouterSpec(
        num_experts=int(raw["num_experts"]),
        top_k=int(raw["num_experts_per_tok"]),
        scoring="sigmoid",
        normalise=bool(raw.get("norm_topk_prob", True)),
        scaling=float(raw.get("routed_scaling_factor", 1.0)),
        correction_bias=True,
        num_groups=int(raw.get("n_group", 1)),
        top_groups=int(raw.get("topk_group", 1)),
    )
    inner = int(raw["moe_intermediate_size"])
    sparse = MoESpec(router=router, inner=inner, shared_inner=inner * int(raw.get("n_shared_experts", 1)))
    dense, num_dense = DenseSpec(inner=int(raw["intermediate_size"])), int(raw.get("first_k_dense_replace", 1))
    num_layers = int(raw["num_hidden_layers"])
    is_dense = [index < num_dense for index in range(num_layers)]
    refuse_other_mlps(raw, is_dense)
    layers = tuple(LayerSpec(attention=attention, mlp=dense if plain else sparse) for plain in is_dense)
    num_extra = int(raw.get("num_nextn_predict_layers", 1))
    return ModelConfig(
        **common_fields(raw.defaulting(rms_norm_eps=1e-5), generation),
        layers=layers,
        ignored_names=tuple(f"model.layers.{num_layers + i}." for i in range(num_extra)),
        mtp=mtp_behind(LayerSpec(attention=attention, mlp=sparse), num_layers) if num_extra else None,
    )

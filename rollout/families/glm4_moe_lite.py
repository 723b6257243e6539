"""GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`).  Numerics as in transformers `models/glm4_moe_lite`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.errors import StartupError
from rollout.core.specs.config_json import Settings
from rollout.core.specs.model_config import ModelConfig, warn_of_unused
from rollout.families.deepseek_v3 import latent_moe_config

_DEFAULTS = {"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}  # transformers'


def parse(raw: Settings, generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a GLM-4.7-Flash model, which has DeepSeek-V3's layers.

    `mlp_layer_types` names the layers with experts, by default all but the first.
    """
    num_layers = int(raw["num_hidden_layers"])
    num_dense = int(raw.get("first_k_dense_replace", 1))
    default = ["dense" if index < num_dense else "sparse" for index in range(num_layers)]
    kinds = raw.get("mlp_layer_types") or default
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise StartupError(f"config.json: mlp_layer_types must be dense or sparse for each of {num_layers} layers")
    warn_of_unused(raw, "first_k_dense_replace", "mlp_layer_types", list(kinds) == default)
    return latent_moe_config(raw.defaulting(**_DEFAULTS), generation, [kind == "dense" for kind in kinds])

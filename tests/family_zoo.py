"""A tiny random checkpoint of every model family, written by transformers from its own configuration of the family.

Weights are scaled so that routers choose decisively and every part of a layer counts: a wrong one shows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollout.core.specs.model_config import ModelConfig
from rollout.families.registry import model_config_from_dict

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
_LATENT: dict[str, Any] = {
    **{key: value for key, value in _SIZES.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

# An inner size that is not a multiple of a vector, as the published 2880 is not a multiple of 128.
_GPT_OSS: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
_NOT_QWEN3_5_MOE = ("intermediate_size", "norm_topk_prob")
# Neither head size is a multiple of the sixteen lanes of a vector.
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
_QWEN3_5: dict[str, Any] = {**_SIZES, **_DELTA, "linear_num_value_heads": 4, "tie_word_embeddings": True}
_QWEN3_5_MOE: dict[str, Any] = {
    **{key: value for key, value in (_SIZES | _EXPERTS | _DELTA).items() if key not in _NOT_QWEN3_5_MOE},
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 8,
    "shared_expert_intermediate_size": 32,
}
_EYES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}

# name -> what transformers' configuration of the family is made with
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_SIZES},
    "qwen2": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "llama": {
        "model_type": "llama",
        **_SIZES,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_SIZES,
        **_EXPERTS,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "glm4_moe, no QK norm": {
        "model_type": "glm4_moe",
        **_SIZES,
        **_EXPERTS,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "attention_bias": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_EXPERTS,
        "q_lora_rank": 48,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v3, Moonlight": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_EXPERTS,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
    },
    "deepseek_v3, all sparse": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_EXPERTS,
        "q_lora_rank": 40,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 64,
        },
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **_LATENT,
        **_EXPERTS,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rms_norm_eps": 1e-5,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_SIZES,
        **_EXPERTS,
        **_DELTA,
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **_QWEN3_5},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **_QWEN3_5_MOE},
    "qwen3_5 that sees": {
        "model_type": "qwen3_5",
        "text_config": _QWEN3_5,
        "vision_config": _EYES,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe that sees": {"model_type": "qwen3_5_moe", "text_config": _QWEN3_5_MOE, "vision_config": _EYES},
    "qwen3_moe": {"model_type": "qwen3_moe", **_SIZES, **_EXPERTS, "num_experts": 8, "mlp_only_layers": [0]},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_SIZES,
        **_EXPERTS,
        "num_experts": 8,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {"model_type": "gpt_oss", **_GPT_OSS, "sliding_window": 7},
    "gpt_oss, long window": {
        "model_type": "gpt_oss",
        **_GPT_OSS,
        "num_hidden_layers": 3,
        "sliding_window": 128,
        "num_local_experts": 16,
        "intermediate_size": 72,
    },
}


SEEING = {name for name, settings in FAMILIES.items() if "vision_config" in settings}


def also_for(names: Iterable[str], otherwise: str) -> pytest.MarkDecorator:
    """Play a test for `otherwise`, the default of the fixture `model`, and in full for each of these families."""
    families = [pytest.param(name, marks=pytest.mark.full) for name in names]
    return pytest.mark.parametrize("model", [otherwise, *families], indirect=True, scope="module")


def family_config(name: str) -> ModelConfig:
    """Return the config as the engine reads it."""
    return model_config_from_dict({**transformers_config(name).to_dict(), "architectures": [_architecture(name)]})


def published_config(name: str) -> dict[str, Any]:
    """Return the content of a `config.json` with the settings in `FAMILIES` alone."""
    return copy.deepcopy({**FAMILIES[name], "architectures": [_architecture(name)], "eos_token_id": 1})


def with_experts(*, layers: int | None = None, experts: int | None = None) -> list[str]:
    """Return the families with MoE layers; `layers` and `experts` are the numbers that they must have.

    Families that see are left out: their text is that of another family, under other names.
    """
    found = []
    for name in (name for name in FAMILIES if name not in SEEING):
        config = family_config(name)
        is_as_wanted = layers in (None, len(config.moe_layer_ids)) and experts in (None, config.num_experts)
        if config.is_moe and is_as_wanted:
            found.append(name)
    return found


def family_checkpoint(folder: Path, name: str, seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write the checkpoint into `folder` and return it.  `changes`: to the settings in `FAMILIES`."""
    model = family_model(name, seed, **changes)
    tensors = in_dtype(model.state_dict(), dtype)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # as in published checkpoints: the embedding is both
    model.save_pretrained(folder, state_dict=tensors)
    return folder


def in_dtype(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors as a trainer of this dtype sends them: a correction bias stays in float32."""
    return {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in tensors.items()
    }


def family_model(name: str, seed: int, **changes: Any) -> Any:
    """Make transformers' model in float32, with random weights."""
    config = transformers_config(name, **changes)
    config._attn_implementation = config._experts_implementation = "eager"  # the others have no float64
    model = _auto_class(config).from_config(config).float().eval()
    random_weights(model, seed)
    return model


def random_weights(model: Any, seed: int) -> None:
    """Fill a model of transformers with random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key:
                tensor.copy_(_random(key, tensor, generator))


def transformers_config(name: str, **changes: Any) -> Any:
    """Return transformers' configuration of a family in `FAMILIES`, with `changes`."""
    settings = FAMILIES[name] | changes
    return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings, eos_token_id=1, pad_token_id=0)


def _architecture(name: str) -> str:
    config = transformers_config(name)
    return _auto_class(config)._model_mapping[type(config)].__name__


def _auto_class(config: Any) -> Any:
    has_eyes = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if has_eyes else transformers.AutoModelForCausalLM


def _random(key: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(tensor.shape, generator=generator)
    if key.endswith("e_score_correction_bias"):
        return 0.1 * values
    if key.endswith("bias"):
        return 0.5 * values
    if key.endswith("sinks"):
        return 1 + values
    if key.endswith("A_log"):
        return values - 4  # states that remember over hundreds of tokens
    if tensor.ndim == 1:
        return tensor + 0.1 * values  # norms begin at zero where one is added to their weight
    is_router = key.endswith(("mlp.gate.weight", "mlp.router.weight"))
    gain = 2.5 if is_router or "conv1d" in key else 2.0 if "embed" in key or "lm_head" in key else 1.0
    return values * gain / math.sqrt(tensor.shape[-1])

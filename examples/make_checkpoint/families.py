"""Random checkpoints of model families that `transformers` writes: the configuration of each, and its weights.

Weights are scaled as in `make_checkpoint`: routers choose decisively, and every part of a layer counts.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from examples.make_checkpoint.spec import OUTPUT_LOGIT_STD, ROUTER_LOGIT_STD, CheckpointSpec
from rollout.core.errors import StartupError
from weight_sync.tensor_meta import DTYPES

BIAS_STD = 0.5
CORRECTION_BIAS_STD = 0.1
NORM_WEIGHT_STD = 0.1
STATE_DECAY_LOG_MEAN = -4.0  # states that remember over hundreds of tokens
FULL_ATTENTION_INTERVAL = 4
SLIDING_WINDOW = 128


def _common(spec: CheckpointSpec, partial_rotary_factor: float | None = None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if partial_rotary_factor is not None:
        rope["partial_rotary_factor"] = partial_rotary_factor
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "tie_word_embeddings": spec.tie,
        "rope_parameters": rope,
    }


def _qwen2(spec: CheckpointSpec) -> dict[str, Any]:
    return {"model_type": "qwen2", **_common(spec)}


def _qwen2_moe(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        **_common(spec),
        **_softmax_experts(spec),
        "norm_topk_prob": spec.norm_topk_prob,
        "mlp_only_layers": list(range(spec.dense_first)),
    }


def _llama(spec: CheckpointSpec) -> dict[str, Any]:
    rope = {
        "rope_type": "llama3",
        "rope_theta": spec.rope_theta,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": max(1, spec.context_length // 8),
    }
    return {"model_type": "llama", **_common(spec), "rope_parameters": rope}


def _sigmoid_experts(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "n_routed_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "norm_topk_prob": spec.norm_topk_prob,
    }


def _glm4_moe(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "model_type": "glm4_moe",
        **_common(spec, partial_rotary_factor=0.5),
        **_sigmoid_experts(spec),
        "first_k_dense_replace": spec.dense_first,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
    }


def _latent(spec: CheckpointSpec) -> dict[str, Any]:
    """Return the settings of latent attention, in the published ratios.

    The latent rank is 4 heads, the rotary part half a head, and the query rank a quarter of the width.
    """
    common = _common(spec)
    del common["head_dim"]
    return {
        **common,
        **_sigmoid_experts(spec),
        "num_key_value_heads": spec.heads,
        "kv_lora_rank": 4 * spec.head_dim,
        "q_lora_rank": max(1, spec.hidden_size // 4),
        "qk_nope_head_dim": spec.head_dim,
        "qk_rope_head_dim": spec.head_dim // 2,
        "v_head_dim": spec.head_dim,
    }


def _deepseek_v3(spec: CheckpointSpec) -> dict[str, Any]:
    grouped = spec.experts % 8 == 0 and spec.top_k <= spec.experts // 2
    return {
        "model_type": "deepseek_v3",
        **_latent(spec),
        "first_k_dense_replace": spec.dense_first,
        "n_group": 4 if grouped else 1,
        "topk_group": 2 if grouped else 1,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": spec.rope_theta,
            "factor": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": max(1, spec.context_length // 8),
        },
    }


def _glm4_moe_lite(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "model_type": "glm4_moe_lite",
        **_latent(spec),
        "qk_nope_head_dim": 3 * spec.head_dim // 2,
        "v_head_dim": 2 * spec.head_dim,
        "mlp_layer_types": ["dense" if layer < spec.dense_first else "sparse" for layer in range(spec.layers)],
        "rms_norm_eps": 1e-5,
    }


def _hybrid(spec: CheckpointSpec) -> dict[str, Any]:
    """Return the settings of hybrid attention: every fourth layer, and the last one, has full attention."""
    full = {*range(FULL_ATTENTION_INTERVAL - 1, spec.layers, FULL_ATTENTION_INTERVAL), spec.layers - 1}
    return {
        **_common(spec, partial_rotary_factor=0.25),
        "layer_types": ["full_attention" if layer in full else "linear_attention" for layer in range(spec.layers)],
        "linear_num_key_heads": spec.kv_heads,
        "linear_num_value_heads": spec.heads,
        "linear_key_head_dim": spec.head_dim,
        "linear_value_head_dim": spec.head_dim,
        "linear_conv_kernel_dim": 4,
    }


def _softmax_experts(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "shared_expert_intermediate_size": spec.moe_intermediate_size,
    }


def _qwen3_next(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "model_type": "qwen3_next",
        **_hybrid(spec),
        **_softmax_experts(spec),
        "norm_topk_prob": spec.norm_topk_prob,
        "mlp_only_layers": list(range(spec.dense_first)),
    }


def _qwen3_5(spec: CheckpointSpec) -> dict[str, Any]:
    return {"model_type": "qwen3_5_text", **_hybrid(spec)}


def _qwen3_5_moe(spec: CheckpointSpec) -> dict[str, Any]:
    hybrid = _hybrid(spec)
    del hybrid["intermediate_size"]
    return {"model_type": "qwen3_5_moe_text", **hybrid, **_softmax_experts(spec)}


def _gpt_oss(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        **_common(spec),
        "intermediate_size": spec.moe_intermediate_size,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top_k,
        "sliding_window": SLIDING_WINDOW,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": spec.rope_theta,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": max(1, spec.context_length // 32),
        },
    }


# family -> the settings of transformers' configuration; families have the names of `spec.FAMILIES`
SETTINGS: dict[str, Callable[[CheckpointSpec], dict[str, Any]]] = {
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "llama": _llama,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gpt_oss": _gpt_oss,
}


def random_model(spec: CheckpointSpec) -> Any:
    """Return transformers' model of `spec.family` in float32 with random weights, the same for the same spec.

    Raises `StartupError` for a family that the installed transformers does not have.
    """
    settings = SETTINGS[spec.family](spec)
    kind = settings.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise StartupError(
            f"transformers {transformers.__version__} does not support the family {spec.family}: install a newer one"
        )
    config = transformers.AutoConfig.for_model(kind, **settings)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.copy_(_random(name, tensor, generator, spec.family == "gpt_oss"))
    return model


def published_form(spec: CheckpointSpec) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return `config.json` and the tensors as `save_pretrained` writes them, in the dtype of the spec.

    A correction bias stays in float32.
    """
    model, dtype = random_model(spec), DTYPES[spec.dtype]
    state = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in model.state_dict().items()
    }
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=state)
        config = json.loads((Path(folder) / "config.json").read_text())
        return config, dict(_tensors_of(Path(folder)))


def _tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def _random(name: str, tensor: torch.Tensor, generator: torch.Generator, inputs_before_outputs: bool) -> torch.Tensor:
    values = torch.randn(tensor.shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return CORRECTION_BIAS_STD * values
    if name.endswith(("bias", "_bias")):
        return BIAS_STD * values
    if name.endswith("sinks"):
        return 1 + values
    if name.endswith("A_log"):
        return values + STATE_DECAY_LOG_MEAN
    if tensor.ndim == 1:
        return tensor + NORM_WEIGHT_STD * values  # norms begin at zero where one is added to their weight
    num_inputs = tensor.shape[-2] if inputs_before_outputs and ".experts." in name else tensor.shape[-1]
    is_router = name.endswith(("mlp.gate.weight", "mlp.router.weight"))
    gain = ROUTER_LOGIT_STD if is_router else OUTPUT_LOGIT_STD if "embed" in name or "lm_head" in name else 1.0
    return values * gain / math.sqrt(num_inputs)

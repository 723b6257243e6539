"""What a checkpoint's `config.json` says about a model, checked and in one frozen record.

Knows the Hugging Face config keys of the supported families.  Does not import torch or transformers, so that the
HTTP process can read it too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.core.errors import StartupError

MOE_ARCHITECTURES = ("Qwen3MoeForCausalLM",)
DENSE_ARCHITECTURES = ("Qwen3ForCausalLM",)
SUPPORTED_ARCHITECTURES = MOE_ARCHITECTURES + DENSE_ARCHITECTURES


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer.  `num_experts == 0` and no MoE layer means dense."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    moe_layer_ids: tuple[int, ...] = ()  # hidden-layer indices of the MoE layers, ascending

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layer_ids)


def load_model_config(model_path: str | Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for extra EOS ids).

    Raises `StartupError` when the folder or file is missing, is not JSON, or names an architecture or an option
    that the engine does not implement.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise StartupError(
            f"--model-path {folder} is not a folder; write a small one with: lockstep make-checkpoint DIR"
        )
    raw = _read_json(folder / "config.json", required=True)
    return model_config_from_dict(raw, _read_json(folder / "generation_config.json", required=False))


def model_config_from_dict(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """`raw` is the parsed `config.json`; `generation` the parsed `generation_config.json`."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise StartupError(
            f"architecture {architecture} is not supported; this version serves {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    _refuse_unsupported_options(raw)
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        layers = int(raw["num_hidden_layers"])
        moe = architecture in MOE_ARCHITECTURES
        # transformers 5 writes `num_local_experts` where published checkpoints have `num_experts`.
        experts = int(raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]) if moe else 0
        return ModelConfig(
            architecture=architecture,
            model_type=raw.get("model_type", ""),
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            torch_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            eos_token_ids=_eos_token_ids(raw, generation or {}),
            num_experts=experts,
            num_experts_per_tok=int(raw["num_experts_per_tok"]) if moe else 0,
            moe_intermediate_size=int(raw["moe_intermediate_size"]) if moe else 0,
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            moe_layer_ids=_moe_layer_ids(raw, layers, experts) if moe else (),
        )
    except KeyError as missing:
        raise StartupError(f"config.json has no {missing.args[0]!r}, which {architecture} needs") from None
    except (TypeError, ValueError) as error:
        raise StartupError(f"config.json: {error}") from None


def _moe_layer_ids(raw: dict[str, Any], num_layers: int, num_experts: int) -> tuple[int, ...]:
    """The rule of transformers' Qwen3MoeDecoderLayer."""
    dense = set(raw.get("mlp_only_layers") or [])
    step = int(raw.get("decoder_sparse_step", 1))
    return tuple(
        layer for layer in range(num_layers) if layer not in dense and num_experts > 0 and (layer + 1) % step == 0
    )


def _rope_theta(raw: dict[str, Any]) -> float:
    """transformers 5 writes `rope_parameters`, older versions `rope_theta`."""
    parameters = raw.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (generation, raw):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))


def _refuse_unsupported_options(raw: dict[str, Any]) -> None:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refusals = {
        f"rope_type {rope_type!r}": rope_type != "default",
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "quantization_config": bool(raw.get("quantization_config")),
    }
    for option, present in refusals.items():
        if present:
            raise StartupError(f"config.json: {option} is not supported by this version")


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise StartupError(f"{path} is missing; --model-path must be a Hugging Face checkpoint folder")
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path} is not a JSON object")
    return content

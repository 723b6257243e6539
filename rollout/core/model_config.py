"""What a checkpoint's `config.json` says about a model, checked and in one frozen record.

A family's file in `rollout.models` makes it from the keys of its own; what families share is here.  Imports
neither torch nor transformers, so that the HTTP process can read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollout.core.errors import StartupError
from rollout.core.layer_specs import (
    LatentAttentionSpec,
    LayerSpec,
    Llama3Scaling,
    MoESpec,
    NormSpec,
    RotarySpec,
    YarnScaling,
    yarn_mscale,
)
from rollout.core.stored_format import StoredFormat, stored_format_of


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer.

    `ignored_names`: prefixes of tensors that checkpoints and trainers may send and the engine does not use.
    `stored_format`: of the checkpoint; it is served in `torch_dtype`, or what the server is told.
    `renamed_prefixes`: what names of tensors may begin with instead, and what the canonical ones begin with.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    ignored_names: tuple[str, ...] = ()
    stored_format: StoredFormat = "plain"
    renamed_prefixes: tuple[tuple[str, str], ...] = ()

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Hidden-layer indices of the MoE layers, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mlp, MoESpec))

    @property
    def moe(self) -> MoESpec | None:
        """That of all MoE layers; None for a dense model."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MoESpec)), None)

    @property
    def is_moe(self) -> bool:
        return self.moe is not None

    @property
    def num_experts(self) -> int:
        return self.moe.router.num_experts if self.moe else 0

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.router.top_k if self.moe else 0


def common_fields(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` that every family states in the same keys.  Raises `KeyError`, `ValueError`."""
    return {
        "architecture": raw["architectures"][0],
        "model_type": raw.get("model_type", ""),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "norm": NormSpec(eps=float(raw.get("rms_norm_eps", 1e-6))),
        "max_position_embeddings": int(raw["max_position_embeddings"]),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "torch_dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        "eos_token_ids": _eos_token_ids(raw, generation),
        "stored_format": stored_format_of(raw),
    }


def heads_of(raw: Mapping[str, Any], rope_types: tuple[str, ...] = ("default",)) -> dict[str, Any]:
    """Sizes and rotation of `AttentionSpec`.  Raises `StartupError` for a rotation not among `rope_types`."""
    heads = int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
    return {
        "num_heads": heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "rotary": rotary_of(raw, head_dim, rope_types),
    }


def rotary_of(
    raw: Mapping[str, Any], head_dim: int, rope_types: tuple[str, ...], interleaved: bool = False
) -> RotarySpec:
    """The rotation of heads of `head_dim`, or of a part of each.  Raises `StartupError` for one not among `rope_types`.

    transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    refuse({f"rope_type {kind!r}": kind not in rope_types})
    share = float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0))
    original = int(rope.get("original_max_position_embeddings") or raw["max_position_embeddings"])
    scaling: Llama3Scaling | YarnScaling | None = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=original,
        )
    elif kind == "yarn":
        scaling = _yarn(rope, original)
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    return RotarySpec(dim=int(head_dim * share), theta=theta, scaling=scaling, interleaved=interleaved)


def _yarn(rope: Mapping[str, Any], original: int) -> YarnScaling:
    """Keys and defaults as in transformers `modeling_rope_utils`."""
    factor = float(rope["factor"])
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_mscale(factor)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=float(attention_factor),
        truncate=bool(rope.get("truncate", True)),
    )


def with_latent_norm_eps(config: ModelConfig, eps: float | None) -> ModelConfig:
    """With this epsilon in the norms of latents; None: as it is.  Raises `StartupError` where there are no latents."""
    if eps is None:
        return config
    if not any(isinstance(layer.attention, LatentAttentionSpec) for layer in config.layers):
        raise StartupError(f"--latent-norm-eps: {config.architecture} has no latent attention; leave it out")
    return replace(config, layers=tuple(_with_latent_eps(layer, eps) for layer in config.layers))


def _with_latent_eps(layer: LayerSpec, eps: float) -> LayerSpec:
    if not isinstance(layer.attention, LatentAttentionSpec):
        return layer
    return replace(layer, attention=replace(layer.attention, latent_eps=eps))


def refuse(options: Mapping[str, bool]) -> None:
    """Raise `StartupError` for the first option that is in use: what no model of the engine implements."""
    for option, is_used in options.items():
        if is_used:
            raise StartupError(f"config.json: {option} is not supported by this version")


def refuse_common(raw: Mapping[str, Any]) -> None:
    """Raise `StartupError` for an option that no family here implements."""
    refuse(
        {
            f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
            "use_sliding_window": bool(raw.get("use_sliding_window")),
        }
    )
    stored_format_of(raw)


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (generation, raw):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))

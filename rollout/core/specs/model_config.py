"""A model as a checkpoint's `config.json` describes it, checked and in one frozen record.

A family's file in `rollout.families` makes it from the keys of its own; the parts that families share are here.
Imports neither torch nor transformers, so that the HTTP process can read it too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from rollout.core.errors import StartupError
from rollout.core.specs.config_json import as_list
from rollout.core.specs.heads import Head
from rollout.core.specs.layer_specs import (
    LatentAttentionSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    MoESpec,
    NormSpec,
    RotarySpec,
    YarnScaling,
    yarn_mscale,
)
from rollout.core.specs.mtp import MtpSpec
from rollout.core.specs.stored_format import StoredFormat, stored_format_of

logger = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotations whose angles do not depend on the other tokens of a step, as the angles of `dynamic` do."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer.

    `ignored_names`: prefixes of tensors that checkpoints and trainers may send and the engine does not use.
    `stored_format`: of the checkpoint; it is served in `torch_dtype`, or in the dtype of the server's flag.
    `renamed_prefixes`: pairs of a prefix that names of tensors may have and the canonical prefix for it.
    `head`: what is on top of the last hidden states.
    `mtp`: a layer that predicts one token further, for drafts; the model computes without it, and ignores its tensors.
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
    head: Head = "vocabulary"
    mtp: MtpSpec | None = None

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Hidden-layer indices of the MoE layers, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mlp, MoESpec))

    @property
    def moe(self) -> MoESpec | None:
        """The spec of all MoE layers; None for a dense model."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MoESpec)), None)

    @property
    def is_moe(self) -> bool:
        return self.moe is not None

    @property
    def digest(self) -> str:
        """16 hex digits of all that the model computes by, and of nothing else: not of its dtype, context or tokens."""
        facts: tuple[Any, ...] = (
            self.vocab_size, self.hidden_size, self.layers, self.norm, self.tie_word_embeddings,
        )  # fmt: skip
        if self.head != "vocabulary":
            facts += (self.head,)
        return blake2b(repr(facts).encode(), digest_size=8).hexdigest()

    @property
    def num_experts(self) -> int:
        return self.moe.router.num_experts if self.moe else 0

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.router.top_k if self.moe else 0


_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}  # torch's other names


def common_fields(
    raw: Mapping[str, Any], generation: Mapping[str, Any], *, states_extended_context: bool = False
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that every family states in the same keys.  Raises `KeyError`, `ValueError`.

    `states_extended_context`: `max_position_embeddings` of the family's published checkpoints is after YaRN.
    """
    return {
        "architecture": raw["architectures"][0],
        "model_type": raw.get("model_type", ""),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "norm": NormSpec(eps=float(raw.get("rms_norm_eps", 1e-6))),
        "max_position_embeddings": _context_length(raw, states_extended_context),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "torch_dtype": _DTYPES.get(dtype := str(raw.get("dtype") or "bfloat16"), dtype),
        "eos_token_ids": _eos_token_ids(raw, generation),
        "stored_format": stored_format_of(raw),
    }


def _context_length(raw: Mapping[str, Any], states_extended_context: bool) -> int:
    """Return the length of the context; with YaRN the original one times its factor, as in vLLM."""
    rope = raw.get("rope_parameters") or {}
    stated = int(raw["max_position_embeddings"])
    if rope.get("rope_type") != "yarn":
        return stated
    yarn = _yarn(rope, stated)
    extended = int(yarn.original_max_position_embeddings * yarn.factor)
    return max(stated, extended) if states_extended_context else extended


def heads_of(
    raw: Mapping[str, Any], *, default_head_dim: int | None = None, partly_rotated: bool = False
) -> dict[str, Any]:
    """Return sizes and rotation of `AttentionSpec`.

    `default_head_dim`: None is an equal share of the hidden size.  `partly_rotated`: transformers' model of the family
    knows `partial_rotary_factor`.  Raises `StartupError` for a rotation that is not built.
    """
    heads = int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or default_head_dim or int(raw["hidden_size"]) // heads)
    rotary = rotary_of(raw, head_dim, ROPE_TYPES)
    refuse({"partial_rotary_factor": rotary.dim != head_dim and not partly_rotated})
    if rotary.dim < 2 or rotary.dim % 2:
        raise StartupError(
            f"config.json: {rotary.dim} of {head_dim} elements of a head rotate; the number must be even"
        )
    return {
        "num_heads": heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "rotary": rotary,
    }


def warn_of_unused(raw: Mapping[str, Any], rule: str, names: str, agree: bool) -> None:
    """Log that a rule for layers gives way to the kinds of all layers by name, which transformers reads, too."""
    if raw.get(rule) is not None and not agree:
        logger.warning(
            "config.json: %s %s is not used, because %s gives the kind of each layer", rule, raw[rule], names
        )


def refuse_other_mlps(raw: Mapping[str, Any], is_dense: list[bool]) -> None:
    """Raise `StartupError` for `mlp_layer_types` other than `first_k_dense_replace`, which transformers reads."""
    kinds = raw.get("mlp_layer_types")
    if kinds and [kind == "dense" for kind in kinds] != is_dense:
        raise StartupError("config.json: mlp_layer_types and first_k_dense_replace differ; remove mlp_layer_types")


def refuse_windows(raw: Mapping[str, Any]) -> None:
    """Raise `StartupError` for a layer that does not attend to all tokens, of a family that has none."""
    kinds = raw.get("layer_types") or []
    refuse({f"layer type {kind!r}": kind != "full_attention" for kind in kinds})
    if kinds and len(kinds) != int(raw["num_hidden_layers"]):
        raise ValueError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {raw['num_hidden_layers']}")


def rotary_of(
    raw: Mapping[str, Any], head_dim: int, rope_types: tuple[str, ...], interleaved: bool = False
) -> RotarySpec:
    """Return the rotation of heads of `head_dim`, or of a part of each.

    Raises `StartupError` for a rotation that is not among `rope_types`.
    `raw` has all of it in `rope_parameters`, as `rollout.core.specs.config_json` gathers it.
    """
    rope = raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    refuse({f"rope_type {kind!r}": kind not in rope_types})
    original = int(rope.get("original_max_position_embeddings") or raw["max_position_embeddings"])
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=_positive(rope, "factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=_positive(rope, "factor"),
            low_freq_factor=_positive(rope, "low_freq_factor"),
            high_freq_factor=_positive(rope, "high_freq_factor"),
            original_max_position_embeddings=original,
        )
        if scaling.low_freq_factor == scaling.high_freq_factor:
            raise ValueError("low_freq_factor and high_freq_factor must differ")
    elif kind == "yarn":
        scaling = _yarn(rope, int(raw["max_position_embeddings"]))
    theta = _positive({"rope_theta": 10000.0, **rope}, "rope_theta")
    share = _positive({"partial_rotary_factor": 1.0, **rope}, "partial_rotary_factor")
    return RotarySpec(dim=int(head_dim * share), theta=theta, scaling=scaling, interleaved=interleaved)


def _yarn(rope: Mapping[str, Any], max_position_embeddings: int) -> YarnScaling:
    """Read YaRN's settings, with keys and defaults as in transformers `modeling_rope_utils`."""
    original = int(rope.get("original_max_position_embeddings") or max_position_embeddings)
    if "factor" in rope:
        factor = _positive(rope, "factor")
    elif original < max_position_embeddings:
        factor = max_position_embeddings / original
    else:
        raise ValueError("YaRN needs a factor")
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


def _positive(rope: Mapping[str, Any], key: str) -> float:
    """Return the number under `key`, which must be above 0.  Raises `ValueError`, `KeyError`."""
    value = rope[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"rope_parameters.{key} must be a number above 0, got {value!r}")
    return float(value)


def with_latent_norm_eps(config: ModelConfig, eps: float | None) -> ModelConfig:
    """Return the model with this epsilon in the norms of latents; None: unchanged.

    Raises `StartupError` where there are no latents.
    """
    if eps is None:
        return config
    if not any(isinstance(layer.attention, LatentAttentionSpec) for layer in config.layers):
        raise StartupError(f"--latent-norm-eps: {config.architecture} has no latent attention; leave it out")
    mtp = config.mtp and replace(config.mtp, layer=_with_latent_eps(config.mtp.layer, eps))
    return replace(config, layers=tuple(_with_latent_eps(layer, eps) for layer in config.layers), mtp=mtp)


def _with_latent_eps(layer: LayerSpec, eps: float) -> LayerSpec:
    if not isinstance(layer.attention, LatentAttentionSpec):
        return layer
    return replace(layer, attention=replace(layer.attention, latent_eps=eps))


def refuse(options: Mapping[str, bool]) -> None:
    """Raise `StartupError` for the first option that is in use: no model of the engine implements it."""
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
    """Return the end ids of both files: each ends an answer, as in other engines."""
    ids = [*as_list(generation.get("eos_token_id")), *as_list(raw.get("eos_token_id"))]
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))

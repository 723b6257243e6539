"""DeepSeek-V3, Moonlight and Kimi-K2 (`DeepseekV3ForCausalLM`).  Numerics as in transformers `models/deepseek_v3`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.core.errors import StartupError
from rollout.core.specs.config_json import Settings
from rollout.core.specs.layer_specs import DenseSpec, LatentAttentionSpec, LayerSpec, MoESpec, RouterSpec, yarn_mscale
from rollout.core.specs.model_config import ModelConfig, common_fields, refuse, refuse_other_mlps, rotary_of
from rollout.core.specs.mtp import mtp_behind

_DEFAULTS = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}  # transformers'


def parse(raw: Settings, generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a DeepSeek-V3 model: latent attention, dense layers first, then experts.

    Routers are sigmoid with a correction bias and groups; layers with experts have shared ones, too.
    """
    refuse({f"moe_layer_freq {raw.get('moe_layer_freq')!r}": raw.get("moe_layer_freq", 1) != 1})
    num_dense = int(_given(raw, "first_k_dense_replace", 3))
    is_dense = [index < num_dense for index in range(int(raw["num_hidden_layers"]))]
    refuse_other_mlps(raw, is_dense)
    return latent_moe_config(raw.defaulting(**_DEFAULTS), generation, is_dense)


def latent_moe_config(raw: Mapping[str, Any], generation: Mapping[str, Any], is_dense: list[bool]) -> ModelConfig:
    """Return the configuration of a model with latent attention.

    `is_dense` states for each layer whether it has no experts.  Layers behind the last hidden one predict
    several tokens at once: the model is without them, and the first of them may draft for it.
    """
    scoring, method = raw.get("scoring_func", "sigmoid"), raw.get("topk_method", "noaux_tc")
    refuse({f"scoring_func {scoring!r}": scoring != "sigmoid", f"topk_method {method!r}": method != "noaux_tc"})
    router = RouterSpec(
        num_experts=int(raw["num_experts"]),
        top_k=int(raw["num_experts_per_tok"]),
        scoring="sigmoid",
        normalise=bool(_given(raw, "norm_topk_prob", True)),
        scaling=float(_given(raw, "routed_scaling_factor", 1.0)),
        correction_bias=True,
        num_groups=int(_given(raw, "n_group", 1)),
        top_groups=int(_given(raw, "topk_group", 1)),
    )
    _check_groups(router)
    inner = int(raw["moe_intermediate_size"])
    sparse = MoESpec(router=router, inner=inner, shared_inner=inner * int(_given(raw, "n_shared_experts", 1)))
    dense, attention = DenseSpec(inner=int(raw["intermediate_size"])), attention_of(raw)
    layers = tuple(LayerSpec(attention=attention, mlp=dense if plain else sparse) for plain in is_dense)
    num_extra = int(_given(raw, "num_nextn_predict_layers", 1))
    ignored = tuple(f"model.layers.{len(layers) + index}." for index in range(num_extra))
    mtp = mtp_behind(LayerSpec(attention=attention, mlp=sparse), len(layers)) if num_extra else None
    common = common_fields(raw, generation, states_extended_context=True)
    return ModelConfig(**common, layers=layers, ignored_names=ignored, mtp=mtp)


def attention_of(raw: Mapping[str, Any]) -> LatentAttentionSpec:
    """Return the latent attention of all layers.  Scores are divided by the root of a query's size.

    YaRN with `mscale_all_dim` scales them twice, once for queries and once for keys.
    """
    rope_size, nope_size = _positive(raw, "qk_rope_head_dim"), _positive(raw, "qk_nope_head_dim")
    if rope_size % 2:
        raise StartupError(f"config.json: qk_rope_head_dim must be even, got {rope_size}")
    for key, size in (("head_dim", rope_size), ("qk_head_dim", nope_size + rope_size)):
        if raw.get(key) not in (None, size):
            raise StartupError(
                f"config.json: {key} is {raw[key]}, but {size} follows from qk_nope_head_dim {nope_size} and "
                f"qk_rope_head_dim {rope_size}; remove {key}"
            )
    rope = raw.get("rope_parameters") or {}
    rotary = rotary_of(raw, rope_size, ("default", "yarn"), interleaved=True)
    refuse(
        {
            "attention_bias": bool(raw.get("attention_bias")),
            "rope_interleave false": not _given(raw, "rope_interleave", True),
            "partial_rotary_factor": rotary.dim != rope_size,
        }
    )
    all_dim = rope.get("mscale_all_dim")
    scaling = rotary.scaling
    mscale = yarn_mscale(scaling.factor, float(all_dim)) if all_dim and scaling is not None else 1.0
    query_rank = raw.get("q_lora_rank")  # null: queries are made of the hidden states
    return LatentAttentionSpec(
        num_heads=_positive(raw, "num_attention_heads"),
        query_rank=None if query_rank is None else _positive(raw, "q_lora_rank"),
        kv_rank=_positive(raw, "kv_lora_rank"),
        nope_size=nope_size,
        value_size=_positive(raw, "v_head_dim"),
        rotary=rotary,
        scale=(nope_size + rope_size) ** -0.5 * mscale * mscale,
    )


def _check_groups(router: RouterSpec) -> None:
    groups, best = router.num_groups, router.top_groups
    if not 1 <= best <= groups or router.num_experts % groups or best * (router.num_experts // groups) < router.top_k:
        raise StartupError(
            f"config.json: n_group {groups} and topk_group {best} do not fit {router.num_experts} experts and "
            f"{router.top_k} experts per token"
        )


def _positive(raw: Mapping[str, Any], key: str) -> int:
    size = int(raw[key])
    if size < 1:
        raise StartupError(f"config.json: {key} must be at least 1, got {size}")
    return size


def _given(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return a setting, or the default if it is absent or null."""
    value = raw.get(key)
    return default if value is None else value

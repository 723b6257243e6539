"""In which format a checkpoint stores its weights, by `quantization_config` of its `config.json`.

Whatever the format, weights are served in the model's dtype, unless the engine holds experts in fewer bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollout.core.errors import StartupError

StoredFormat = Literal["plain", "fp8", "mxfp4", "int4"]
"""fp8: tensors that are float8_e4m3fn have a float32 scale for each block of 128 x 128, as DeepSeek-V3 is published.
mxfp4: experts are in MXFP4, as GPT-OSS is published.  int4: matrices in 4 bits with a scale for 32 or 128 elements, as
Kimi-K2-Thinking is published by compressed-tensors.  All other tensors are plain, as their dtypes and names show."""

# format -> key -> the values that are served; keys that are not here are refused, whatever their value.
_FORMATS: dict[StoredFormat, dict[str, tuple[Any, ...]]] = {
    "fp8": {
        "quant_method": ("fp8",),
        "weight_block_size": ([128, 128],),
        "fmt": ("e4m3",),
        "activation_scheme": ("dynamic",),
        "scale_fmt": ("float", "ue8m0", None),
        "expert_dtype": ("fp8", None),
        "dequantize": (False, None),
        "modules_to_convert": ([], None),
    },
    "mxfp4": {"quant_method": ("mxfp4",), "dequantize": (False, True, None)},
    "int4": {
        "quant_method": ("compressed-tensors",),
        "format": ("pack-quantized",),
        "quantization_status": ("compressed",),
        "sparsity_config": ({}, None),
        "transform_config": ({}, None),
    },
}
# Of keys and values: a scale for the keys and one for the values of a layer, among the tensors.
_KV_CACHE: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor",),
    "symmetric": (True,),
    "dynamic": (False,),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None,),
}
# Of the weights of each group of `config_groups`.
_INT4_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (32, 128),
    "actorder": (None, False),
    "block_structure": (None,),
    "dynamic": (False,),
}
_INT4_FREE = ("config_groups", "ignore", "version", "global_compression_ratio", "kv_cache_scheme")
_OF_QUANTISING = ("observer", "observer_kwargs")
_REQUIRED = {"quant_method", "weight_block_size"}
_LISTS_OF_PLAIN = ("modules_to_not_convert", "ignored_layers")


def stored_format_of(raw: Mapping[str, Any]) -> StoredFormat:
    """Return the stored format that the parsed `config.json` `raw` states.

    Raises `StartupError` that names the key whose value is not served.
    """
    stated = raw.get("quantization_config")
    if not stated:
        return "plain"
    if not isinstance(stated, Mapping):
        raise StartupError(f"config.json: quantization_config must be an object, got {str(stated)[:60]!r}")
    by_method: dict[Any, StoredFormat] = {"mxfp4": "mxfp4", "compressed-tensors": "int4"}
    method = stated.get("quant_method")
    stored_format = by_method.get(method, "fp8") if isinstance(method, str) else "fp8"
    if stored_format == "int4":
        if _has_kv_cache_alone(stated):
            return "plain"
        _require(stated, _FORMATS["int4"], {"quant_method", "format"}, _INT4_FREE)
        _require_int4_groups(stated.get("config_groups"))
    else:
        required = _REQUIRED if stored_format == "fp8" else {"quant_method"}
        _require(stated, _FORMATS[stored_format], required, _LISTS_OF_PLAIN)
    return stored_format


def _has_kv_cache_alone(stated: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint by compressed-tensors has scales of keys and values, and plain weights."""
    scheme = stated.get("kv_cache_scheme")
    if scheme is None:
        return False
    if not isinstance(scheme, Mapping):
        raise _refusal(f"kv_cache_scheme {str(scheme)[:60]!r}")
    _require(scheme, _KV_CACHE, {"num_bits", "type", "strategy"}, _OF_QUANTISING)
    if stated.get("config_groups"):
        return False
    served = {key: _FORMATS["int4"][key] for key in ("quant_method", "sparsity_config", "transform_config")}
    _require(stated, served, {"quant_method"}, (*_INT4_FREE, "format", "quantization_status"))
    return True


def _require_int4_groups(groups: Any) -> None:
    if not isinstance(groups, Mapping) or not groups:
        raise _refusal("no config_groups")
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _refusal("a group without weights")
        _require(weights, _INT4_WEIGHTS, {"num_bits", "type", "strategy", "group_size"}, _OF_QUANTISING)
        activations = {"input_activations": (None,), "output_activations": (None,), "format": ("pack-quantized", None)}
        _require(group, activations, set(), ("weights", "targets"))


def _require(
    stated: Mapping[str, Any], served: Mapping[str, tuple[Any, ...]], required: set[str], free: tuple[str, ...]
) -> None:
    for key in [*served, *(key for key in stated if key not in (*served, *free))]:
        if (key in stated or key in required) and stated.get(key) not in served.get(key, ()):
            raise _refusal(f"{key} {str(stated[key])[:60]!r}" if key in stated else f"no {key}")


def _refusal(value: str) -> StartupError:
    return StartupError(
        f"config.json: quantization_config with {value} is not supported. This version reads FP8 like DeepSeek-V3's "
        "(e4m3, blocks of [128, 128], dynamic activations) and MXFP4 like GPT-OSS's. It reads INT4 like "
        "Kimi-K2-Thinking's (pack-quantized, symmetric, groups of 32 or 128)."
    )

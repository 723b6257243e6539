"""In which format a checkpoint stores its weights, by `quantization_config` of its `config.json`.

Whatever the format, weights are served in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollout.core.errors import StartupError

StoredFormat = Literal["plain", "fp8"]
"""fp8: tensors that are float8_e4m3fn have a float32 scale for each block of 128 x 128; others are plain."""

# Key -> the values that are served; keys that are not here are refused, whatever their value.
_FP8: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "weight_block_size": ([128, 128],),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", None),
    "expert_dtype": ("fp8", None),
    "dequantize": (False, None),
    "modules_to_convert": ([], None),
}
_FP8_REQUIRED = ("quant_method", "weight_block_size")
_LISTS_OF_PLAIN = ("modules_to_not_convert", "ignored_layers")  # each tensor's dtype says whether it is quantised


def stored_format_of(raw: Mapping[str, Any]) -> StoredFormat:
    """`raw` is the parsed `config.json`.  Raises `StartupError` that names the key whose value is not served."""
    stated = raw.get("quantization_config")
    if not stated:
        return "plain"
    if not isinstance(stated, Mapping):
        raise StartupError(f"config.json: quantization_config must be an object, got {str(stated)[:60]!r}")
    keys = [key for key in (*_FP8, *stated) if key in stated or key in _FP8_REQUIRED]
    for key in dict.fromkeys(keys):
        if key not in _LISTS_OF_PLAIN and stated.get(key) not in _FP8.get(key, ()):
            value = f"{key} {str(stated[key])[:60]!r}" if key in stated else f"no {key}"
            raise StartupError(
                f"config.json: quantization_config with {value} is not supported by this version; of quantised "
                "checkpoints it reads FP8 as DeepSeek-V3's (e4m3, blocks of [128, 128], dynamic activations)"
            )
    return "fp8"

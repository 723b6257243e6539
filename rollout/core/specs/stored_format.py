"""In which format a checkpoint stores its weights, by `quantization_config` of its `config.json`.

Whatever the format, weights are served in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rollout.core.errors import StartupError

StoredFormat = Literal["plain", "fp8", "mxfp4"]
"""fp8: tensors that are float8_e4m3fn have a float32 scale for each block of 128 x 128, as DeepSeek-V3 is published.
mxfp4: experts are in MXFP4, as GPT-OSS is published.  All other tensors are plain, as their dtypes and names show."""

# format -> key -> the values that are served; keys that are not here are refused, whatever their value.
_FORMATS: dict[StoredFormat, dict[str, tuple[Any, ...]]] = {
    "fp8": {
        "quant_method": ("fp8",),
        "weight_block_size": ([128, 128],),
        "fmt": ("e4m3",),
        "activation_scheme": ("dynamic",),
        "scale_fmt": ("float", None),
        "expert_dtype": ("fp8", None),
        "dequantize": (False, None),
        "modules_to_convert": ([], None),
    },
    "mxfp4": {"quant_method": ("mxfp4",), "dequantize": (False, True, None)},
}
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
    stored_format: StoredFormat = "mxfp4" if stated.get("quant_method") == "mxfp4" else "fp8"
    served = _FORMATS[stored_format]
    for key in [*served, *(key for key in stated if key not in (*served, *_LISTS_OF_PLAIN))]:
        if (key in stated or key in _REQUIRED) and stated.get(key) not in served.get(key, ()):
            value = f"{key} {str(stated[key])[:60]!r}" if key in stated else f"no {key}"
            raise StartupError(
                f"config.json: quantization_config with {value} is not supported. This version reads FP8 like "
                "DeepSeek-V3's (e4m3, blocks of [128, 128], dynamic activations) and MXFP4 like GPT-OSS's."
            )
    return stored_format

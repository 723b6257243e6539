"""The reading of a `config.json` by transformers: the judge of the engine's reading.

transformers resolves a file to one value for each setting, and writes them back under one name each.  The engine must
read the file as it reads that, or refuse it; and its rotation must have transformers' frequencies.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers

from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import RotarySpec, YarnScaling
from rollout.core.specs.model_config import ModelConfig
from rollout.families.registry import model_config_from_dict
from rollout.layers.norm_rotary import _frequencies

UNUSABLE = "transformers cannot use it"
Resolved = tuple[ModelConfig, torch.Tensor, float]


def ours(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelConfig | str:
    """Return the engine's reading, or the reason why it refuses."""
    try:
        return model_config_from_dict(raw, overrides=overrides)
    except StartupError as error:
        assert "\n" not in str(error)
        return str(error)


def theirs(raw: Mapping[str, Any]) -> Resolved | None:
    """Let transformers resolve `raw`; return the engine's reading of the result, and transformers' rotation.

    A rotation is radians a position and the factor of cosines.  None where transformers cannot use `raw`, or where
    the engine refuses the result.
    """
    settings = copy.deepcopy(dict(raw))
    try:
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        text = config.get_text_config()
        module = importlib.import_module(type(text).__module__.replace("configuration_", "modeling_"))
        names = [name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name]
        rotation = getattr(module, names[0])(text)
        if 2 * len(rotation.inv_freq) != getattr(text, "qk_rope_head_dim", 2 * len(rotation.inv_freq)):
            return None  # its forward raises, as a head's rotated part and the cosines differ in size
        plain = {**config.to_dict(), "architectures": raw["architectures"]}
        return model_config_from_dict(plain), rotation.inv_freq, float(rotation.attention_scaling)
    except Exception:
        return None


def difference(raw: Mapping[str, Any]) -> str | None:
    """Return how the engine's reading differs from transformers'; None if it does not, or if the engine refuses."""
    mine = ours(raw)
    if isinstance(mine, str):
        return None
    right = theirs(raw)
    if right is None:
        return UNUSABLE
    config, frequencies, factor = right
    if replace(mine, torch_dtype=config.torch_dtype) != config:
        return f"{mine} is not {config}"
    if all(layer.attention.rotary is None for layer in mine.layers):
        return None
    spec = rotation_of(mine)
    found = _frequencies(spec, torch.float32)
    scale = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0
    if found.shape != frequencies.shape or not torch.allclose(found, frequencies, rtol=1e-5, atol=0):
        return f"frequencies {found} are not {frequencies}"
    return None if abs(scale - factor) < 1e-6 else f"the factor of cosines {scale} is not {factor}"


def rotation_of(config: ModelConfig) -> RotarySpec:
    """Return the rotation of the layers that have one, which is the same in all of them."""
    (spec,) = {layer.attention.rotary for layer in config.layers if layer.attention.rotary is not None}
    return spec

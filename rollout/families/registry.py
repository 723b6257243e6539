"""Model families by the architecture name of `config.json`.  A family is a file and a line here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rollout.core.args.hub import objection_to_folder
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.specs.config_json import RotaryDefaults, Settings, require_read, settings_of
from rollout.core.specs.heads import BARE_PREFIXES, family_architecture, head_of
from rollout.core.specs.model_config import ModelConfig, refuse_common, with_latent_norm_eps

# architecture -> module; its `parse` makes a `ModelConfig` of the settings in `config.json` and of
# `generation_config.json`.  It may have `ROTARY`, its defaults, and `HAS_PARTS`: a `text_config` in `config.json`.
# The same decoders are served with other heads, or none: see `heads`.
FAMILIES = {
    "Qwen3MoeForCausalLM": "rollout.families.qwen3_moe",
    "Qwen3ForCausalLM": "rollout.families.qwen3",
    "Qwen2ForCausalLM": "rollout.families.qwen2",
    "Qwen2MoeForCausalLM": "rollout.families.qwen2_moe",
    "LlamaForCausalLM": "rollout.families.llama",
    "Glm4MoeForCausalLM": "rollout.families.glm4_moe",
    "Glm4MoeLiteForCausalLM": "rollout.families.glm4_moe_lite",
    "DeepseekV3ForCausalLM": "rollout.families.deepseek_v3",
    "GptOssForCausalLM": "rollout.families.gpt_oss",
    "Qwen3NextForCausalLM": "rollout.families.qwen3_next",
    "Qwen3_5ForCausalLM": "rollout.families.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "rollout.families.qwen3_5",
    "Qwen3_5MoeForCausalLM": "rollout.families.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "rollout.families.qwen3_5",
}


def served_model_config(args: ServerArgs) -> ModelConfig:
    """Return the configuration of `args.model_path` with the server's own changes.  Raises `StartupError`."""
    config = load_model_config(args.model_path, args.model_overrides)
    return with_latent_norm_eps(config, args.latent_norm_eps)


def load_model_config(model_path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for extra EOS ids).

    `overrides` replace settings of `config.json`; objects are merged.

    Raises `StartupError` when the folder or file is missing, is not JSON, or names an architecture or an option
    that the engine does not implement.  It is also raised for an override of an unknown setting.
    """
    folder = Path(model_path)
    if (objection := objection_to_folder(str(model_path))) is not None:
        raise StartupError(f"--model-path {objection}")
    raw = _read_json(folder / "config.json", required=True)
    return model_config_from_dict(raw, _read_json(folder / "generation_config.json", required=False), overrides)


def model_config_from_dict(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Return the model configuration of a parsed `config.json`, `raw`, and `generation_config.json`, `generation`.

    Raises `StartupError`.
    """
    overrides = overrides or {}
    stated = (overrides.get("architectures") or raw.get("architectures") or ["(none)"])[0]
    architecture, ending = family_architecture(stated)
    if architecture not in FAMILIES:
        raise StartupError(f"architecture {stated} is not supported; this version serves {', '.join(FAMILIES)}")
    family = import_module(FAMILIES[architecture])
    if raw.get("text_config") and not getattr(family, "HAS_PARTS", False):
        raise StartupError(f"config.json: text_config is not supported for {stated}; put its settings at the top level")
    settings = settings_of(raw, getattr(family, "ROTARY", RotaryDefaults()), overrides)
    refuse_common(settings)
    try:
        config = _with_head(family.parse(settings, generation or {}), ending, settings)
    except KeyError as missing:
        raise StartupError(f"config.json has no {missing.args[0]!r}, which {stated} needs") from None
    except (TypeError, ValueError) as error:
        raise StartupError(f"config.json: {error}") from None
    require_read(settings, raw, overrides)
    return config


def _with_head(config: ModelConfig, ending: str, settings: Settings) -> ModelConfig:
    """Return the configuration of a family's decoder under the head that the architecture's ending names."""
    head = head_of(ending, settings)
    if head == "vocabulary":
        return config
    renamed = config.renamed_prefixes + (BARE_PREFIXES if head == "none" else ())
    return replace(config, head=head, tie_word_embeddings=False, renamed_prefixes=renamed)


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

"""Model families by the architecture name of `config.json`.  A family is a file and a line here."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from rollout.core.errors import StartupError
from rollout.core.model_config import ModelConfig, refuse_common

# architecture -> module; its `parse` makes a `ModelConfig` of `config.json` and `generation_config.json`
FAMILIES = {
    "Qwen3MoeForCausalLM": "rollout.models.qwen3_moe",
    "Qwen3ForCausalLM": "rollout.models.qwen3",
    "Qwen2ForCausalLM": "rollout.models.qwen2",
    "LlamaForCausalLM": "rollout.models.llama",
    "Glm4MoeForCausalLM": "rollout.models.glm4_moe",
    "Glm4MoeLiteForCausalLM": "rollout.models.glm4_moe_lite",
    "DeepseekV3ForCausalLM": "rollout.models.deepseek_v3",
    "GptOssForCausalLM": "rollout.models.gpt_oss",
    "Qwen3NextForCausalLM": "rollout.models.qwen3_next",
    "Qwen3_5ForCausalLM": "rollout.models.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "rollout.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "rollout.models.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "rollout.models.qwen3_5",
}


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
    """`raw` is the parsed `config.json`; `generation` the parsed `generation_config.json`.  Raises `StartupError`."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise StartupError(f"architecture {architecture} is not supported; this version serves {', '.join(FAMILIES)}")
    refuse_common(raw)
    try:
        return import_module(FAMILIES[architecture]).parse(raw, generation or {})
    except KeyError as missing:
        raise StartupError(f"config.json has no {missing.args[0]!r}, which {architecture} needs") from None
    except (TypeError, ValueError) as error:
        raise StartupError(f"config.json: {error}") from None


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

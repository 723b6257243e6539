"""Model classes by the architecture name of `config.json`.  A model is a file and a line here."""

from __future__ import annotations

from importlib import import_module

from rollout.core.errors import StartupError
from rollout.models.decoder import ModelFactory

# architecture -> (module, class)
MODELS = {
    "Qwen3MoeForCausalLM": ("rollout.models.qwen3_moe", "Qwen3MoeForCausalLM"),
    "Qwen3ForCausalLM": ("rollout.models.qwen3", "Qwen3ForCausalLM"),
}


def model_class(architecture: str) -> ModelFactory:
    """Raises `StartupError` for an architecture that is not registered."""
    if architecture not in MODELS:
        raise StartupError(f"architecture {architecture} is not supported; this version serves {', '.join(MODELS)}")
    module, class_name = MODELS[architecture]
    return getattr(import_module(module), class_name)

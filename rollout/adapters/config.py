"""`LoraConfig`: the settings of PEFT's `adapter_config.json` that decide what an adapter computes.

Settings that only training reads are known and dropped.  Any other setting that holds something is refused by name, as
it would change the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.core.errors import AdapterError

_ONLY_FOR_TRAINING = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("megatron_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    }
)
"""These settings take effect while an adapter is trained.  The tensors say which modules are adapted."""
_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"}
)
_REASONS = {
    "use_dora": "DoRA (use_dora) is not served",
    "modules_to_save": "modules_to_save are whole modules, not adapters: merge them into the checkpoint",
    "trainable_token_indices": "trainable_token_indices change the embedding, which is not served",
    "lora_bias": "lora_bias is not served: train without biases",
    "fan_in_fan_out": "fan_in_fan_out is for models with Conv1D, which are not served",
    "target_parameters": "target_parameters adapt the experts of a layer in one tensor; adapters of routed experts are "
    "not served",
}
_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that do not change the base model's weights."""


@dataclass(frozen=True)
class LoraConfig:
    """Rank and scale of every module; patterns hold for modules whose name they match, as in PEFT."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilised: bool = False

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> LoraConfig:
        """Return the configuration of a parsed `adapter_config.json`.

        Raises `AdapterError` for another method than LoRA, for settings that are not served, and for ranks and alphas
        that are not positive numbers.
        """
        if raw.get("peft_type") != "LORA":
            raise _refusal(f"peft_type is {raw.get('peft_type')!r}; only LORA is served")
        if raw.get("bias", "none") != "none":
            raise _refusal(f"bias is {raw['bias']!r}: biases are not adapted; train with bias='none'")
        if raw.get("init_lora_weights", True) not in _KEEP_THE_BASE:
            raise _refusal(
                f"init_lora_weights {raw['init_lora_weights']!r} changes the base model: convert the adapter as you "
                "save it (path_initial_model_for_weight_conversion in PEFT)"
            )
        for name, value in raw.items():
            if value and name not in _ONLY_FOR_TRAINING | _READ:
                raise _refusal(_REASONS.get(name, f"{name} is not known to this server"))
        ranks = {key: _rank(f"rank_pattern[{key!r}]", value) for key, value in _pattern(raw, "rank_pattern").items()}
        alphas = {key: _alpha(f"alpha_pattern[{key!r}]", x) for key, x in _pattern(raw, "alpha_pattern").items()}
        return cls(
            rank=_rank("r", raw.get("r")),
            alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
            rank_pattern=ranks,
            alpha_pattern=alphas,
            is_rank_stabilised=bool(raw.get("use_rslora")),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the model that was trained."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product: alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski, 2023)."""
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches the end of the module's name, as PEFT's `get_pattern_key` does."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _pattern(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise _refusal(f"{name} must be an object, got {type(value).__name__}")
    for key in value:
        try:
            re.compile(key)
        except re.error as error:
            raise _refusal(f"{name}: {key[:80]!r} cannot be read as a pattern: {error}") from None
    return value


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def _alpha(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise _refusal(f"{name} must be a positive number, got {value!r}: at 0 an adapter does nothing")
    return float(value)


def _refusal(reason: str) -> AdapterError:
    return AdapterError(f"adapter_config.json: {reason}")

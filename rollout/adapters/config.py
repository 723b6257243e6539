"""`LoraConfig`: the settings of PEFT's `adapter_config.json` that decide what an adapter computes.

Settings that only training reads are known and dropped.  Any other setting that holds something is refused by name, as
it would change the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout.core.errors import AdapterError
from rollout.core.known_fields import shown

V = TypeVar("V")

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
    {
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"),
        "target_parameters",
    }
)
_REASONS = {
    "use_dora": "DoRA (use_dora) is not served",
    "modules_to_save": "modules_to_save are whole modules, not adapters: merge them into the checkpoint",
    "trainable_token_indices": "trainable_token_indices change the embedding, which is not served",
    "lora_bias": "lora_bias is not served: train without biases",
    "fan_in_fan_out": "fan_in_fan_out is for models with Conv1D, which are not served",
}
_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that do not change the base model's weights."""
_BEFORE = r"(.*\.)?"
"""A part of each pattern, as in PEFT: it matches the end of a name."""
_MAX_PATTERN_CHARS = 512
_MAX_BITS = 20
"""Limit of the logarithm of the steps of a failed match, but for the prefix that every pattern gets.

Two repeats leave room for 255 alternatives in one group, three for 3.
"""
_BITS_OF_REPEAT = 6
_NOT_SIGNS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""Escapes and classes of a pattern: each matches one character."""


@dataclass(frozen=True)
class LoraConfig:
    """Rank and scale of every module; patterns hold for modules whose name they match, as in PEFT.

    `target_parameters`: ends of the names of adapted parameters, which hold all experts of a layer.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[re.Pattern[str], int] = field(default_factory=dict)
    alpha_pattern: Mapping[re.Pattern[str], float] = field(default_factory=dict)
    is_rank_stabilised: bool = False
    target_parameters: tuple[str, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> LoraConfig:
        """Return the configuration of a parsed `adapter_config.json`.

        Raises `AdapterError` for another method than LoRA, for settings that are not served, and for ranks and alphas
        that are not positive numbers.
        """
        if raw.get("peft_type") != "LORA":
            raise _refusal(f"peft_type is {_text(raw.get('peft_type'))}; only LORA is served")
        if raw.get("bias", "none") != "none":
            raise _refusal(f"bias is {_text(raw['bias'])}: biases are not adapted; train with bias='none'")
        if raw.get("init_lora_weights", True) not in _KEEP_THE_BASE:
            raise _refusal(
                f"init_lora_weights {_text(raw['init_lora_weights'])} changes the base model: convert the adapter as "
                "you save it (path_initial_model_for_weight_conversion in PEFT)"
            )
        for name, value in raw.items():
            if value and name not in _ONLY_FOR_TRAINING | _READ:
                raise _refusal(_REASONS.get(name, f"{shown(name)} is not known to this server"))
        if not isinstance(raw.get("use_rslora") or False, bool):
            raise _refusal(f"use_rslora must be true or false, got {_text(raw['use_rslora'])}")
        return cls(
            rank=_rank("r", raw.get("r")),
            alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
            rank_pattern=_patterns(raw, "rank_pattern", _rank),
            alpha_pattern=_patterns(raw, "alpha_pattern", _alpha),
            is_rank_stabilised=bool(raw.get("use_rslora")),
            target_parameters=_target_parameters(raw),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the model that was trained."""
        return next((rank for key, rank in self.rank_pattern.items() if key.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product: alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski, 2023)."""
        alpha = next((alpha for key, alpha in self.alpha_pattern.items() if key.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def unmatched(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the patterns that match none of these modules, with their setting.  PEFT ignores such patterns."""
        settings: dict[str, Iterable[re.Pattern[str]]]
        settings = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
        return tuple(
            f"{setting} {_text(key.pattern[len(_BEFORE) + 1 : -2])}"
            for setting, keys in settings.items()
            for key in keys
            if not any(map(key.match, modules))
        )


def target_modules(raw: Mapping[str, Any]) -> list[str]:
    """Return the ends of the names of the modules that a parsed `adapter_config.json` adapts.

    Raises `AdapterError` where these alone do not say it: then a manifest must.
    """
    ends, has_parameters = raw.get("target_modules") or [], bool(raw.get("target_parameters"))
    more = [name for name in ("exclude_modules", "layers_to_transform", "layers_pattern") if raw.get(name)]
    is_list = isinstance(ends, list) and (bool(ends) or has_parameters)
    if more or not is_list or not all(isinstance(end, str) and end for end in ends):
        why = f"with {more[0]}" if more else f"with target_modules {_text(raw.get('target_modules'))}"
        raise _refusal(f"{why} the update needs a manifest of its tensors, or target_modules as a list of names alone")
    return ends


def _target_parameters(raw: Mapping[str, Any]) -> tuple[str, ...]:
    names = raw.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise _refusal(f"target_parameters must be a list of names, got {_text(names)}")
    return tuple(sorted(names))


def _patterns(raw: Mapping[str, Any], name: str, check: Callable[[str, Any], V]) -> dict[re.Pattern[str], V]:
    """Return the checked values by pattern: the first that matches the end of a module's name counts, as in PEFT.

    Raises `AdapterError` for patterns that are broken, or with which a match could take for ever.
    """
    value = {} if raw.get(name) is None else raw[name]
    if not isinstance(value, dict):
        raise _refusal(f"{name} must be an object, got {type(value).__name__}")
    patterns: dict[re.Pattern[str], V] = {}
    for key, of_modules in value.items():
        try:
            if len(key) > _MAX_PATTERN_CHARS or _bits_of(key) > _MAX_BITS:
                raise _refusal(f"{name}: {_text(key)} has too many repeats or alternatives, or is too long")
            re.compile(key)
            patterns[re.compile(rf"{_BEFORE}({key})$")] = check(f"{name}[{key!r}]", of_modules)
        except (re.error, OverflowError, RecursionError) as error:
            raise _refusal(f"{name}: {_text(key)} cannot be read as a pattern: {error}") from None
    return patterns


def _bits_of(pattern: str) -> float:
    """Return about log2 of the steps in which a name fails to match: each repeat may end anywhere in it.

    It is infinite for the repeats of a group, which may hold others, and for comments and flags, which may hide them.
    """
    signs = _NOT_SIGNS.sub("x", pattern)
    if re.search(r"\)[*+{]", signs) or re.search(r"\(\?[^:=!<P]", pattern):
        return math.inf
    repeats, groups = sum(map(signs.count, "*+{")), signs.count("(")
    choices = max(1, groups) * math.log2(1 + signs.count("|") / max(1, groups))
    return _BITS_OF_REPEAT * repeats + choices + signs.count("?")


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(f"{shown(name)} must be a whole number of at least 1, got {_text(value)}")
    return value


def _alpha(name: str, value: Any) -> float:
    try:
        alpha = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        alpha = math.inf
    if not 0 < alpha < math.inf:
        raise _refusal(f"{shown(name)} must be a positive number, got {_text(value)}: at 0 an adapter does nothing")
    return alpha


def _text(value: Any) -> str:
    return shown(repr(value))


def _refusal(reason: str) -> AdapterError:
    return AdapterError(f"adapter_config.json: {reason}")

"""vLLM's `--speculative-config`, a JSON object, in the words of `lockstep serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollout.core.errors import StartupError

NAME = "speculative_config"
_TEXT, _MODEL, _OWN = "NGRAM", "STANDALONE", "NEXTN"
_METHODS = {
    "ngram": _TEXT,
    "ngram_gpu": _TEXT,
    "suffix": _TEXT,
    "draft_model": _MODEL,
    "mtp": _OWN,
    "nextn": _OWN,
    **dict.fromkeys(
        (f"{family}_mtp" for family in ("deepseek", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5")), _OWN
    ),
}
_DEPTH = {_TEXT: "speculative_num_draft_tokens", _MODEL: "speculative_num_steps", _OWN: "speculative_num_steps"}
# Keys that change how fast answers come and nothing else.
_WITHOUT_EFFECT = frozenset(
    {
        *("prompt_lookup_min", "prompt_lookup_max", "disable_by_batch_size", "draft_tensor_parallel_size"),
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
        *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        *("disable_padded_drafter_batch", "use_local_argmax_reduction", "max_model_len", "enforce_eager"),
    }
)


def settings_of(given: str | Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of an object, or of its JSON, and its keys without effect.

    Raises `StartupError` for anything else, and for a method or a key that the server does not know.
    """
    config = _object(given)
    model = config.pop("model", None)
    method = config.pop("method", None) or ("ngram" if model in (None, "ngram", "[ngram]") else "draft_model")
    kind = _METHODS.get(method) if isinstance(method, str) else None
    if kind is None:
        raise StartupError(f"--speculative-config: no method {method!r}; there are {', '.join(_METHODS)}")
    found = {"speculative_algorithm": kind}
    if (depth := config.pop("num_speculative_tokens", None)) is not None:
        found[_DEPTH[kind]] = depth
    if unknown := sorted(map(str, config.keys() - _WITHOUT_EFFECT)):
        raise StartupError(f"--speculative-config: unknown keys {', '.join(unknown)}")
    unused = sorted(config)
    if kind == _MODEL:
        if model is None:
            raise StartupError("--speculative-config: the method draft_model needs a model")
        found["speculative_draft_model_path"] = model
    elif model not in (None, method, f"[{method}]"):
        unused.append("model")  # the text or the served checkpoint drafts
    return found, unused


def _object(given: str | Mapping[str, Any]) -> dict[str, Any]:
    try:
        config = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise StartupError(f"--speculative-config must be JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise StartupError(f"--speculative-config must be an object, got {given!r}")
    return dict(config)

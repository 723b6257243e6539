"""A `config.json` with every setting in one place.

    two spellings      n_routed_experts, num_local_experts, num_experts      -> num_experts
    two places         rope_scaling, rope_parameters, rope_theta             -> rope_parameters
    a part             text_config of a model that also sees                 -> the text model's settings
    overrides          --json-model-override-args, the same three again      -> in the place of the file's

A setting that stands in two places must have one value, or is refused with both names: tools differ in which of them
they read.  The rest is as transformers reads it.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.core.errors import StartupError

OVERRIDES_FLAG = "--json-model-override-args"

# The name by which the engine reads a setting, and the others that it has.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("experts_per_token",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "hidden_act": ("hidden_activation",),
    "dtype": ("torch_dtype",),
    "quantization_config": ("compression_config",),
}
_CANONICAL = {other: name for name, others in SPELLINGS.items() for other in others}

_ROPE = "rope_parameters"
_ROPE_DICTS = ("rope_scaling", _ROPE)  # as transformers: the first wins
_ROPE_OUTSIDE = ("rope_theta", "partial_rotary_factor")  # stand inside of these, or next to them
_ORIGINAL = "original_max_position_embeddings"
_ORIGINALS_OUTSIDE = (_ORIGINAL, "initial_context_length")
_ROPE_OF_ALL = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
# What each kind of scaled rotation reads.
_ROPE_OF: dict[str, set[str]] = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {
        *("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate", "finetuned"),
    },
}
_NULL_COUNTS = {"truncate"}  # transformers takes its null as false, every other one as left out

_PARTS = ("text_config", "vision_config")
# Of a model that also sees: settings that the whole has of its own, and settings that may stand in either place.
_OF_THE_WHOLE = {
    *("architectures", "model_type"),
    *("id2label", "num_labels", "problem_type", "token_classification_bias"),
}
_OF_THE_PART = {"pad_token_id"}  # of the text alone: the one of the whole is not read
_IN_EITHER = {"dtype", "tie_word_embeddings", "quantization_config"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RotaryDefaults:
    """The rotation of a family where the configuration does not state it.  `scaling`: without any `rope_parameters`."""

    theta: float = 10000.0
    partial: float = 1.0
    scaling: Mapping[str, Any] = field(default_factory=dict)


class Settings(Mapping[str, Any]):
    """A model's settings, each under one name.  `asked` has the names that a family has looked for.

    Raises `StartupError` where a setting is read that stands in two places with two values.
    """

    def __init__(self, values: Mapping[str, Any], contested: Mapping[str, str] | None = None) -> None:
        self._values = dict(values)
        self._contested = dict(contested or {})
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        if name in self._contested:
            raise StartupError(self._contested[name])
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def defaulting(self, **defaults: Any) -> Settings:
        """Return the same settings, with these values for names that are missing or null."""
        other = Settings(self._values, self._contested)
        other.asked = self.asked
        other._values |= {name: value for name, value in defaults.items() if self._values.get(name) is None}
        return other


def settings_of(raw: Mapping[str, Any], rotary: RotaryDefaults, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of the parsed `config.json` `raw`, with `overrides` in the place of its own.

    Raises `StartupError` for two values of one setting.
    """
    values, contested = _flat(raw, "config.json", rotary)
    if overrides:
        given, refused = _flat(overrides, OVERRIDES_FLAG, rotary)
        if refused:
            raise StartupError(next(iter(refused.values())))
        values = _overridden(values, given)
        contested = {name: reason for name, reason in contested.items() if name not in given}
    if _ROPE not in contested:
        values[_ROPE] = _completed_rotation(values, rotary)
    return Settings(values, contested)


def require_read(settings: Settings, raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise `StartupError` for an override that the family has no use for, unless the file has such a key, too."""
    known = {*settings.asked, *(other for name in settings.asked for other in SPELLINGS.get(name, ()))}
    known |= {*_ROPE_DICTS, *_ROPE_OUTSIDE, *_ORIGINALS_OUTSIDE, *_PARTS}
    given = [*overrides, *(overrides.get("text_config") or ())]
    stated = {*raw, *(raw.get("text_config") or ())}
    for name in given:
        if name in known:
            continue
        if name not in stated:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StartupError(f"{OVERRIDES_FLAG}: this model has no setting {name!r}{hint}")
        logger.warning("%s: %s has no effect on this engine", OVERRIDES_FLAG, name)


# --- one place for each ----------------------------------------------------------------------------------------------


def _flat(raw: Mapping[str, Any], origin: str, rotary: RotaryDefaults) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values by name, the text model's where it is a part; and, by name, why a value is contested.

    Raises `StartupError` for two spellings or rotations that differ.
    """
    whole = _spelled({key: value for key, value in raw.items() if key not in _PARTS}, origin)
    _gather_rotation(whole, origin, rotary)
    if raw.get("text_config") is None:
        return whole, {}
    if not isinstance(raw["text_config"], Mapping):
        raise StartupError(f"{origin}: text_config must be an object, got {str(raw['text_config'])[:60]!r}")
    part = _spelled(raw["text_config"], f"{origin}, text_config")
    _gather_rotation(part, f"{origin}, text_config", rotary)
    return _merged_parts(whole, part, origin)


def _spelled(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the values under the engine's names.

    Raises `StartupError` for one setting with two values; a null counts as none.
    """
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in raw.items():
        name = _CANONICAL.get(key, key)
        if name == "dtype" and isinstance(value, str):
            value = value.removeprefix("torch.")
        if found.get(name) is None:
            found[name], names[name] = value, key
        elif value is not None and value != found[name]:
            raise StartupError(_two(origin, names[name], found[name], key, value))
    return found


def _merged_parts(
    whole: Mapping[str, Any], part: Mapping[str, Any], origin: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the text model's settings, with the shared settings of the whole, and messages on contested names."""
    values, contested = dict(part), {}
    for name, value in whole.items():
        if name in _OF_THE_WHOLE:
            values[name] = value
        elif name == "eos_token_id":
            values[name] = [*as_list(part.get(name)), *as_list(value)]
        elif value is None or part.get(name) == value or name in _OF_THE_PART:
            continue
        elif part.get(name) is not None:
            contested[name] = _two(origin, name, value, f"text_config.{name}", part[name])
        elif name in _IN_EITHER or origin == OVERRIDES_FLAG:
            values[name] = value
        else:
            contested[name] = f"{origin}: {name} stands outside of text_config, where no model reads it; move it there"
    return values, contested


def _overridden(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `given` in their place.

    A rotation of the same kind is replaced key by key.  Of one of another kind only the keys that all kinds have stay.
    """
    found = {**values, **given}
    if _ROPE in given:
        before, after = values.get(_ROPE) or {}, given[_ROPE]
        if after.get("rope_type", before.get("rope_type")) != before.get("rope_type"):
            before = {key: value for key, value in before.items() if key in _ROPE_OF_ALL}
        found[_ROPE] = {**before, **after}
    return found


# --- the rotation ----------------------------------------------------------------------------------------------------


def _gather_rotation(values: dict[str, Any], origin: str, rotary: RotaryDefaults) -> None:
    """Put all that `values` state of the rotation under `rope_parameters`, and remove it elsewhere.

    Raises `StartupError`.
    """
    dicts = {name: _rotation(values.pop(name), name, origin) for name in _ROPE_DICTS if name in values}
    outside = {name: values.pop(name, None) for name in (*_ROPE_OUTSIDE, *_ORIGINALS_OUTSIDE)}
    stated = {name: rope for name, rope in dicts.items() if rope}
    fallback = {"rope_theta": outside["rope_theta"], "partial_rotary_factor": outside["partial_rotary_factor"]}
    fallback = {name: value for name, value in fallback.items() if value is not None}
    defaults = {"rope_theta": rotary.theta, "partial_rotary_factor": rotary.partial}
    found = _one_rotation(stated, {**defaults, **fallback}, origin)
    name = next(iter(stated), _ROPE)
    for key, value in fallback.items():
        if found.setdefault(key, value) != value:
            raise StartupError(_two(origin, key, value, f"{name}.{key}", found[key]))
    if _kind_of(found) in ("llama3", "yarn") or origin == OVERRIDES_FLAG:
        _gather_original(found, outside, name, values, origin)
    if origin == OVERRIDES_FLAG and dicts and not stated:
        found["rope_type"] = "default"  # a null takes the scaling away
    elif origin != OVERRIDES_FLAG and (stated or dicts.get(_ROPE) is not None):
        found.setdefault("rope_type", "default")
    if found:
        values[_ROPE] = found


def _rotation(value: Any, name: str, origin: str) -> dict[str, Any] | None:
    """Copy a rotation without its nulls, its kind under the newer key `rope_type`; None for null.

    Raises `StartupError`.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise StartupError(f"{origin}: {name} must be an object, got {str(value)[:60]!r}")
    nested = [key for key, inner in value.items() if isinstance(inner, Mapping)]
    if nested:
        raise StartupError(f"{origin}: {name} by layer type ({', '.join(nested)}) is not supported by this version")
    rope = {key: inner for key, inner in value.items() if inner is not None or key in _NULL_COUNTS}
    old = rope.pop("type", None)
    if old is not None and rope.setdefault("rope_type", old) != old:
        raise StartupError(_two(origin, f"{name}.rope_type", rope["rope_type"], f"{name}.type", old))
    _check_keys(rope, name, origin)
    return rope


def _check_keys(rope: Mapping[str, Any], name: str, origin: str) -> None:
    """Raise `StartupError` for an override that nothing reads, and warn of such a key of the file."""
    kind = _kind_of(rope)
    of_kind = set().union(*_ROPE_OF.values()) if kind == "default" else _ROPE_OF.get(kind, set(rope))
    known = _ROPE_OF_ALL | of_kind
    for key in rope.keys() - known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if origin == OVERRIDES_FLAG:
            raise StartupError(f"{origin}: {name} has no setting {key!r}{hint}")
        logger.warning("%s: %s.%s has no effect%s", origin, name, key, hint)


def _one_rotation(stated: Mapping[str, dict[str, Any]], fallback: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return one of two rotations that agree, or the scaled one if the other is plain.

    transformers takes `rope_scaling` alone, and keys that it lacks from outside of both: `fallback`.  Raises
    `StartupError`.
    """
    if len(stated) < 2:
        return dict(next(iter(stated.values()), {}))
    scaling, parameters = (stated[name] for name in _ROPE_DICTS)
    lost = {key: parameters[key] for key in _ROPE_OUTSIDE if key in parameters and key not in scaling}
    is_plain = _kind_of(parameters) == "default"
    rest = {key: value for key, value in parameters.items() if key != "rope_type" and key not in lost}
    differs = any(scaling.get(key, value) != value for key, value in rest.items()) or (
        not is_plain and {**scaling, **lost} != parameters
    )
    if differs or any(fallback[key] != value for key, value in lost.items()):
        raise StartupError(
            f"{origin}: rope_scaling {scaling} and rope_parameters {parameters} differ; keep one, with its rope_theta"
        )
    return {**scaling, **lost}


def _gather_original(
    found: dict[str, Any], outside: Mapping[str, Any], name: str, values: Mapping[str, Any], origin: str
) -> None:
    """Put the length of the context before its scaling into the rotation `found`.  Raises `StartupError`."""
    stated = outside[_ORIGINAL]
    if stated is not None and found.setdefault(_ORIGINAL, stated) != stated:
        raise StartupError(_two(origin, _ORIGINAL, stated, f"{name}.{_ORIGINAL}", found[_ORIGINAL]))
    initial, original = outside["initial_context_length"], found.get(_ORIGINAL, values.get("max_position_embeddings"))
    if initial is not None and original is None:
        found[_ORIGINAL] = initial
    elif initial is not None and initial != original:
        raise StartupError(_two(origin, "initial_context_length", initial, f"{name}.{_ORIGINAL}", original))


def _completed_rotation(values: Mapping[str, Any], rotary: RotaryDefaults) -> dict[str, Any]:
    """Return the rotation with the family's defaults where nothing is stated.

    Raises `StartupError` for a scaling factor without a kind of scaling.
    """
    rope = dict(values.get(_ROPE) or {})
    if "rope_type" not in rope:
        rope = {"rope_type": "default", **rotary.scaling, **rope}
    if rope["rope_type"] == "default" and rope.get("factor", 1) != 1:
        raise StartupError(
            f"rope_parameters have factor {rope['factor']!r} but rope_type 'default'; give another rope_type"
        )
    rope.setdefault("rope_theta", rotary.theta)
    rope.setdefault("partial_rotary_factor", rotary.partial)
    return rope


def _kind_of(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", "default"))


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, null as an empty list, and any other value as a list of one."""
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _two(origin: str, name: str, value: Any, other: str, its: Any) -> str:
    return f"{origin}: {name} is {_shown(value)} and {other} is {_shown(its)}; give both one value, or remove one"


def _shown(value: Any) -> str:
    return repr(value)[:80]

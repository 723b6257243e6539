"""JSON schemas in words that the library of grammars holds to exactly.

A text under the mask of a schema has to be valid, and each valid value has to have a text.  Some schemas are rewritten
for that, and some refused; what the library refuses by itself is left to it.

* Its own `format`s are replaced by `rollout.grammar.formats`.
* It reads numbers as floating point, and the bounds of integers in 64 bits.  Numbers that change by that are refused.
* It does not know that the key `"\\u0061"` is `"a"`.  Where that matters, texts have no escapes of that form: control
  characters cannot be written then, but for those with a short escape.
* It takes in an exclusive bound that is a whole number where the other bound is less than one away.  The next number in
  floating point is the bound then, which a JSON number that is read so cannot be before; behind 0 it is 1e-20.
* It does not see that a key comes twice.  So a count of keys without names is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeGuard

from rollout.core.errors import BadRequest
from rollout.grammar.formats import pattern_of

MAX_JSON_DEPTH = 64
_OPTIONS = "x-guidance"
"""The keyword for options of the library."""
_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01]|7f)")
"""A control character in JSON that Python wrote."""
_SHORT_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas under names."""
_OF_DATA = frozenset({"const", "enum"})
_NOTES = frozenset({"default", "example", "examples"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_MAX_INT64 = 2**63 - 1
"""A usual `maximum` of integers, which the library reads as 2^63, and cuts to 64 bits."""
_BEHIND_ZERO = 1e-20
"""The least number above an exclusive 0 that has a text; each digit of it takes the library time."""
_MAX_SUCCESSIVE = 2**53
"""The first integer that floating point does not tell from the next one."""


def exact_schema(schema: Any) -> Any:
    """Return a schema for the same values, to which the library holds exactly.

    Raises `BadRequest` if no mask can, or if the schema is too deep.
    """
    written = _written(schema, 0)
    if isinstance(written, dict) and _confuses_names(schema):
        if _has_control(schema):
            raise BadRequest(
                "json_schema: const or enum has a control character, and objects take keys that the schema does not "
                "name; give them additionalProperties: false"
            )
        written = written | {_OPTIONS: _SHORT_ESCAPES}
    return written


def _written(schema: Any, depth: int) -> Any:
    if depth > MAX_JSON_DEPTH:
        raise BadRequest(f"json_schema is nested more than {MAX_JSON_DEPTH} deep")
    if isinstance(schema, list):
        return [_written(each, depth + 1) for each in schema]
    if not isinstance(schema, dict):
        return schema
    _check(schema)
    written = {}
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, dict):
            written[key] = {name: _written(each, depth + 1) for name, each in value.items()}
        elif key in _OF_DATA or key in _NOTES:
            written[key] = value
        else:
            written[key] = _written(value, depth + 1)
    return _with_pattern(_with_next_bounds(written))


def _with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with a regular expression in the place of its `format`."""
    name, others = schema.get("format"), schema.get("allOf", [])
    pattern = pattern_of(name) if isinstance(name, str) else None
    if pattern is None or not isinstance(others, list):
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    whole = f"^(?:{pattern})$"
    if "pattern" not in rest:
        return rest | {"pattern": whole}
    return rest | {"allOf": [*others, {"pattern": whole}]}


def _check(schema: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for what the library would hold to only nearly, in one schema without those inside."""
    if _OPTIONS in schema:
        raise BadRequest(f"json_schema: {_OPTIONS} is not taken, as a schema always holds by its own words")
    for key in _BOUNDS & schema.keys():
        if key != "maximum" or schema.get("type") != "integer" or schema[key] != _MAX_INT64:
            _check_numbers(key, schema[key], 0)
    for key in _OF_DATA & schema.keys():
        _check_numbers(key, schema[key], 0)
    least = schema.get("minProperties")
    if isinstance(least, int | float) and least > 1 + len(_names(schema)):
        raise BadRequest(
            "json_schema: minProperties asks for two keys or more that the schema does not name; name them in required"
        )


def _check_numbers(keyword: str, value: Any, depth: int) -> None:
    if depth > MAX_JSON_DEPTH:
        raise BadRequest(f"json_schema is nested more than {MAX_JSON_DEPTH} deep")
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _check_numbers(keyword, each, depth + 1)
    elif isinstance(value, int | float) and not _is_kept(value, keyword.startswith("exclusive")):
        raise BadRequest(f"json_schema: {keyword} has a number that a mask cannot hold to exactly: {str(value)[:40]}")


def _is_kept(number: int | float, is_exclusive: bool) -> bool:
    """Return whether a number is the same as floating point, in the shortest digits of that, and in 64 bits.

    An exclusive bound of integers becomes the next one in floating point.
    """
    if abs(number) <= _MAX_SUCCESSIVE:
        return True
    if is_exclusive or not -(2**63) < number < 2**63:
        return False
    return int(number) == int(float(number)) == int(Decimal(repr(float(number))))


def _loses_bound(schema: Mapping[str, Any]) -> bool:
    """Return whether numbers between the bounds of a schema and of its `allOf` would have an exclusive bound too."""
    arms = schema.get("allOf")
    parts = [schema, *(each for each in arms if isinstance(each, dict))] if isinstance(arms, list) else [schema]
    above, above_or_at = _ends(parts, "minimum", "exclusiveMinimum")
    below, below_or_at = _ends(parts, "maximum", "exclusiveMaximum")
    return _is_next(above, below + below_or_at) or _is_next(
        [-end for end in below], [-end for end in above + above_or_at]
    )


def _with_next_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without exclusive bounds that the library would take in."""
    if schema.get("type") == "integer" or not _loses_bound(schema):
        return schema
    moved, arms = _moved(schema), schema.get("allOf")
    if not isinstance(arms, list):
        return moved
    return moved | {"allOf": [_moved(each) if isinstance(each, dict) else each for each in arms]}


def _moved(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose exclusive bounds that are whole are bounds at the next number."""
    moved = dict(schema)
    for plain, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bound = moved.get(plain)
        end = bound if moved.get(exclusive) is True else moved.get(exclusive)
        if _is_number(end) and end % 1 == 0:
            following = sign * _BEHIND_ZERO if end == 0 else math.nextafter(end, sign * math.inf)
            moved[plain] = sign * max(sign * each for each in (following, bound) if _is_number(each))
            del moved[exclusive]
    return moved


def _is_next(ends: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether one of `others` is behind a whole one of `ends`, and before the next whole number."""
    wholes = {end for end in ends if end >= 0 and end % 1 == 0}
    return any(other % 1 != 0 and other // 1 in wholes for other in others)


def _ends(schemas: Sequence[Mapping[str, Any]], plain: str, exclusive: str) -> tuple[list[float], list[float]]:
    """Return the exclusive bounds at one end, and the others.  In draft 4 the keyword is a switch."""
    inclusive: list[Any] = [each.get(plain) for each in schemas]
    outer: list[Any] = [each.get(exclusive) for each in schemas]
    outer = [end if switch is True else switch for end, switch in zip(inclusive, outer, strict=True)]
    return [end for end in outer if _is_number(end)], [end for end in inclusive if _is_number(end)]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names(schema: Mapping[str, Any]) -> set[str]:
    """Return the keys that a schema names: a key of `properties` need not be in the object."""
    required, properties = schema.get("required"), schema.get("properties")
    names = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    return names | set(properties if isinstance(properties, dict) else ())


def _confuses_names(schema: Any) -> bool:
    """Return whether a key that is spelled with escapes could pass for another one, here or in a schema inside."""
    if isinstance(schema, dict):
        named, patterns = schema.get("properties"), schema.get("patternProperties")
        is_open = schema.get("additionalProperties", True) is not False
        is_counted = schema.get("minProperties", 0) not in (0, 1)
        if (named and patterns) or (is_open and (named or patterns or is_counted)):
            return True
    return any(map(_confuses_names, _inside(schema)))


def _has_control(schema: Any) -> bool:
    """Return whether a text that the schema asks for has a control character without a short escape."""
    if isinstance(schema, dict) and any(_CONTROL.search(json.dumps(schema[key])) for key in _OF_DATA & schema.keys()):
        return True
    return any(map(_has_control, _inside(schema)))


def _inside(schema: Any) -> list[Any]:
    """Return the schemas in the values of a schema, and lists of them."""
    if isinstance(schema, list):
        return schema
    inside: list[Any] = []
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in _OF_NAMES and isinstance(value, dict):
            inside += value.values()
        elif key not in _OF_DATA and key not in _NOTES:
            inside.append(value)
    return inside

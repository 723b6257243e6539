"""Calls whose arguments stand between tags, without quotes: of Qwen3-Coder and GLM.

A value ends at a closing tag if the rest of a call follows it.  A tag that something else follows is part of the value,
and so is a whole call.  In a thought a value can hold neither the end of the thought nor a call, as what is read may be
words about calls.

Each function reads a call, or the calls of a block, from behind the tag that opens it to its end.  All raise
`NotACall`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rollout.http.openai.parsers.said import ToolCall
from rollout.http.openai.parsers.text import NotACall, Reading, Text

Tools = Sequence[dict[str, Any]]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_DEPTH = 8
"""Calls within values of calls."""

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<>\n]*")
_HEAD = re.compile(r"[^<]*")


def read_qwen3_coder_calls(text: Text, tools: Tools, depth: int = 0) -> Reading[list[ToolCall]]:
    """Read one or more `<function=NAME>` with `<parameter=KEY>` inside.  Models leave out closing tags."""
    calls: list[ToolCall] = []
    while True:
        yield from text.space()
        if calls and (yield from text.goes_on(CLOSE)):
            text.at += len(CLOSE)
            return calls
        yield from text.expect(_FUNCTION)
        name = yield from _name(text)
        pairs = yield from _coder_pairs(text, depth)
        calls.append(_typed_call(name, pairs, tools))


def _coder_pairs(text: Text, depth: int) -> Reading[list[tuple[str, str]]]:
    pairs = []
    while True:
        yield from text.space()
        tag = yield from text.goes_on(_PARAMETER, _FUNCTION_END, _FUNCTION, CLOSE)
        if tag == _PARAMETER:
            text.at += len(tag)
            key = yield from _name(text)
            pairs.append((key, (yield from _coder_value(text, depth))))
        elif tag is None:
            raise NotACall(is_cut=text.is_spent)
        else:
            text.at += len(tag) if tag == _FUNCTION_END else 0
            return pairs


def _coder_value(text: Text, depth: int) -> Reading[str]:
    """Read a value.  The newline next to each of its tags is not part of it."""
    begin = text.at
    while True:
        tag = yield from text.find(_PARAMETER_END, _PARAMETER, _FUNCTION_END, CLOSE, OPEN, *text.barriers)
        end = text.at
        text.at += len(tag)
        if tag == _PARAMETER_END:
            is_end = yield from _is_next(text, _PARAMETER, _FUNCTION_END, CLOSE, _FUNCTION)
        elif tag == _PARAMETER:
            is_end = text.since(begin, end).rstrip(" \t").endswith("\n")
            text.at = end if is_end else text.at
        elif tag in (_FUNCTION_END, CLOSE):
            is_end = yield from _ends_block(text, is_closed=tag == CLOSE)
            text.at = end if is_end else text.at
        else:
            is_end = False
            yield from _skip_call(text, tag, depth, (_FUNCTION,), read_qwen3_coder_calls)
        if is_end:
            return text.since(begin, end).removeprefix("\n").removesuffix("\n")


def _ends_block(text: Text, *, is_closed: bool) -> Reading[bool]:
    """Return whether a value without a closing tag ends here: nothing, or another call, follows."""
    if not is_closed:
        if (yield from _is_next(text, _FUNCTION)):
            return True
        if not (yield from _is_next(text, CLOSE)):
            return False
        text.at += len(CLOSE)
    return (yield from _is_next(text, OPEN)) or text.is_spent


def read_glm_call(text: Text, tools: Tools, depth: int = 0) -> Reading[list[ToolCall]]:
    """Read `NAME`, then `<arg_key>` and `<arg_value>` in turns: GLM 4.5 to 5, which differ in white space only.

    GLM writes anything but text as JSON, also where the tool does not know the parameter.
    """
    name = (yield from text.run(_HEAD)).strip()
    pairs = []
    while (yield from text.expect(_KEY, CLOSE)) == _KEY:
        key = yield from text.run(_HEAD)
        yield from text.expect(_KEY_END)
        yield from text.space()
        yield from text.expect(_VALUE)
        pairs.append((key, (yield from _glm_value(text, depth))))
        yield from text.space()
    if not name:
        raise NotACall
    return [_typed_call(name, pairs, tools, unknown={})]


def _glm_value(text: Text, depth: int) -> Reading[str]:
    begin = text.at
    while True:
        tag = yield from text.find(_VALUE_END, OPEN, *text.barriers)
        end = text.at
        text.at += len(tag)
        if tag != _VALUE_END:
            yield from _skip_call(text, tag, depth, (), read_glm_call)
        elif (yield from _is_next(text, _KEY, CLOSE)):
            return text.since(begin, end)


def _name(text: Text) -> Reading[str]:
    """Read a name, which holds no "<", and the end of its tag.

    With "<" in names, the rest of the text would be searched again for each tag that never ends.
    """
    name = yield from text.run(_NAME)
    yield from text.expect(">")
    if not name.strip():
        raise NotACall
    return name.strip()


def _is_next(text: Text, *tags: str) -> Reading[bool]:
    """Return whether one of `tags` follows white space, which is read then."""
    begin = text.at
    yield from text.space()
    if (yield from text.goes_on(*tags)):
        return True
    if not text.is_spent:
        text.at = begin
    return False


def _skip_call(text: Text, tag: str, depth: int, first: tuple[str, ...], read: Any) -> Reading[None]:
    """Read a whole call within a value, if `tag`, which was read, opens one."""
    if tag in text.barriers:
        text.at -= len(tag)
        raise NotACall
    begin = text.at
    if first:
        is_call = yield from _is_next(text, *first)
    else:
        yield from text.run(_NAME)
        is_call = yield from _is_next(text, _KEY)
    text.at = begin
    if not is_call:
        return
    if depth == MAX_DEPTH:
        raise NotACall
    yield from read(text, (), depth + 1)


# --- values ------------------------------------------------------------------------------------------------------


def _typed_call(name: str, pairs: Iterable[tuple[str, str]], tools: Tools, unknown: Any = None) -> ToolCall:
    """Return a call whose values have the types of the tool's schema, or of `unknown` for a parameter not in it."""
    parameters = _parameters(name, tools)
    schemas = parameters.get("properties")
    schemas = schemas if isinstance(schemas, dict) else {}
    values = {
        key.strip(): _json_text(text, value_types(schemas.get(key.strip(), unknown), parameters)) for key, text in pairs
    }
    members = ", ".join(f"{_quoted(key)}: {value}" for key, value in values.items())
    return ToolCall(name, f"{{{members}}}")


def _parameters(name: str, tools: Tools) -> dict[str, Any]:
    """Return the schema of a tool's arguments, empty if the tool or its schema is missing."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _json_text(text: str, types: set[str] | None) -> str:
    """Return the JSON of the value that `text` stands for.  Formats without quotes leave that to a parameter's schema.

    It is a text without a schema, and where the schema does not allow the JSON value.  A number keeps its digits.
    """
    if types is None or types == {"string"}:
        return _quoted(text)
    written = text.strip()
    if "boolean" in types and len(written) < 6:
        written = written.lower()
    try:
        value = msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError):
        return _quoted(text)
    kind = _JSON_TYPES.get(type(value), "null")
    fits = not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return written if fits else _quoted(text)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def value_types(schema: Any, root: dict[str, Any]) -> set[str] | None:
    """Return the types that a schema names.  Empty: it allows any type; None: there is no schema."""
    if not isinstance(schema, dict):
        return None
    found: set[str] = set()
    seen: set[int] = set()  # a schema may refer to itself
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        named = {name for name in _listed(part.get("type")) if isinstance(name, str)}
        values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
        found |= named or {_JSON_TYPES.get(type(value), "null") for value in values}
        if isinstance(target := part.get("$ref"), str):
            parts.append(_definition(target, root))
        for key in ("anyOf", "oneOf", "allOf"):
            parts += _listed(part.get(key))
    return found


def _definition(target: str, root: dict[str, Any]) -> Any:
    """Return the schema that a reference names within the tool's own schema, None if there is none."""
    place: Any = root
    for part in target.removeprefix("#/").split("/"):
        place = place.get(part) if isinstance(place, dict) else None
    return place


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

"""What models write between `<tool_call>` and `</tool_call>`, read as calls: one function a format.

Each takes the text between the markers and the request's tools, and returns the calls, none if the text is malformed.
Names are not checked against the tools: whoever runs the tools must see a call to one that does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


Tools = Sequence[dict[str, Any]]
CallReader = Callable[[str, Tools], list[ToolCall]]


def read_json_call(block: str, tools: Tools) -> list[ToolCall]:
    """`{"name": ..., "arguments": {...}}`: Hermes, Qwen 2.5 and 3."""
    try:
        call = msgspec.json.decode(block)
    except (msgspec.DecodeError, RecursionError):
        return []
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        return []
    arguments = call.get("arguments", call.get("parameters", {}))
    return [_call(name, arguments)] if isinstance(arguments, dict) else []


# Names hold no "<", or a text of beginnings that never end would be searched from each to its end.
_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def read_qwen3_coder_call(block: str, tools: Tools) -> list[ToolCall]:
    """`<function=NAME>` with `<parameter=KEY>` inside; the newline next to each tag is not part of a value."""
    return [
        _typed_call(function[1].strip(), _PARAMETER.findall(function[2]), tools)
        for function in _FUNCTION.finditer(block)
    ]


_SPACE = re.compile(r"\s*")


def read_glm_call(block: str, tools: Tools) -> list[ToolCall]:
    """`NAME`, then `<arg_key>` and `<arg_value>` in turns: GLM 4.5 to 5, which differ in white space only.

    What is no text, GLM writes as JSON, also where the tool does not know the parameter.
    """
    name = block.partition("<arg_key>")[0]
    pairs = _glm_arguments(block, len(name))
    if not name.strip() or "<" in name or pairs is None:
        return []
    return [_typed_call(name.strip(), pairs, tools, unknown={})]


def _glm_arguments(text: str, at: int) -> list[tuple[str, str]] | None:
    """Keys and values from `at` to the end; None where anything else is between them."""
    pairs = []
    while at < len(text):
        found = []
        for tag in ("arg_key", "arg_value"):
            opening, closing = f"<{tag}>", f"</{tag}>"
            end = text.find(closing, at) if text.startswith(opening, at) else -1
            if end < 0:
                return None
            found.append(text[at + len(opening) : end])
            at = _after_space(text, end + len(closing))
        pairs.append((found[0], found[1]))
    return pairs


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


TOOL_CALL_READERS: dict[str, CallReader] = {
    "qwen": read_json_call,
    "qwen25": read_json_call,
    "hermes": read_json_call,
    "qwen3_coder": read_qwen3_coder_call,
    "glm45": read_glm_call,
    "glm47": read_glm_call,
}


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name, msgspec.json.encode(arguments).decode())


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], tools: Tools, unknown: Any = None) -> ToolCall:
    """`unknown` is the schema of a parameter that the tool does not have."""
    schemas = _parameter_schemas(name, tools)
    return _call(name, {key.strip(): _typed(text, schemas.get(key.strip(), unknown)) for key, text in pairs})


def _parameter_schemas(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _typed(text: str, schema: Any) -> Any:
    """The value that `text` stands for: formats without quotes leave that to the parameter's schema.

    Text without a schema, and where the schema does not allow the JSON value.
    """
    types = _types(schema)
    if types is None or types == {"string"}:
        return text
    try:
        value = msgspec.json.decode(text.lower() if "boolean" in types and len(text) < 6 else text)
    except (msgspec.DecodeError, RecursionError):
        return text
    kind = _JSON_TYPES.get(type(value), "null")
    fits = not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return value if fits else text


def _types(schema: Any) -> set[str] | None:
    """The types that a schema names; empty: any, None: there is no schema."""
    if not isinstance(schema, dict):
        return None
    arms = [arm for key in ("anyOf", "oneOf") for arm in _listed(schema.get(key)) if isinstance(arm, dict)]
    return {name for part in [schema, *arms] for name in _listed(part.get("type")) if isinstance(name, str)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

"""Calls as expressions of a grammar: for each format the text of one call, as models write it and parsers read it.

Each function takes the grammar, the name of a tool and the schema of its arguments, which are an object.  It returns
what follows the marker that opens a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rollout.http.openai.parsers import harmony
from rollout.http.openai.parsers.lark import Lark, json_value, literal, one_of
from rollout.http.openai.parsers.tagged_calls import CLOSE, value_types

Schema = dict[str, Any]

_DEEPSEEK_MARKERS = ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_NOT_IN_VALUE = r"<parameter=|<\/?function|<\/?tool_call>"
_NOT_IN_GLM_VALUE = r"<\/?arg_key>|<arg_value>|<\/?tool_call>"


def hermes_call(lark: Lark, name: str, schema: Schema) -> str:
    """Return an object with name and arguments, and the closing tag."""
    begin = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return " ".join([literal(begin), json_value(schema), literal("}\n"), lark.token(CLOSE)])


def llama_call(lark: Lark, name: str, schema: Schema) -> str:
    """Return an object with name and parameters."""
    begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
    return " ".join([literal(begin), json_value(schema), literal("}")])


def deepseek_v31_call(lark: Lark, name: str, schema: Schema) -> str:
    """Return the name, a separator and the arguments."""
    separator, end = map(lark.token, _DEEPSEEK_MARKERS)
    return " ".join([literal(name), separator, json_value(schema), end])


def deepseek_v3_call(lark: Lark, name: str, schema: Schema) -> str:
    """Return the kind of tool, a separator, the name, and the arguments in a fenced block."""
    separator, end = map(lark.token, _DEEPSEEK_MARKERS)
    fence = literal(f"{name}\n```json\n")
    return " ".join([literal("function"), separator, fence, json_value(schema), literal("\n```"), end])


def kimi_call(lark: Lark, name: str, schema: Schema) -> str:
    """Return the id, which has name and number, and the arguments."""
    separator, end = map(lark.token, ("<|tool_call_argument_begin|>", "<|tool_call_end|>"))
    number = lark.terminal("/[0-9]{1,3}/")
    return " ".join([literal(f"functions.{name}:"), number, separator, json_value(schema), end])


def harmony_call(lark: Lark, name: str, schema: Schema) -> str:
    """Return a message to the function; the token that ends the turn follows."""
    channel, constrain, message = map(lark.token, (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE))
    recipient = literal(f"commentary to=functions.{name} ")
    return " ".join([channel, recipient, constrain, literal("json"), message, json_value(schema)])


def qwen3_coder_call(lark: Lark, name: str, schema: Schema) -> str:
    """Return tags for the function and for each parameter; texts stand without quotes."""
    parts = [literal(f"\n<function={name}>\n")]
    for key, value, is_needed in _members(schema):
        inner = _value(lark, value, schema, "\n</parameter>\n", _NOT_IN_VALUE)
        parts.append(_optional(f"{literal(f'<parameter={key}>{chr(10)}')} {inner}", is_needed))
    return " ".join([*parts, literal("</function>\n"), lark.token(CLOSE)])


def glm_call(lark: Lark, name: str, schema: Schema) -> str:
    """Return the name, and tags for keys and values in turns; texts stand without quotes."""
    parts = [literal(f"{name}\n")]
    key_tag, key_end, value_tag = map(lark.token, ("<arg_key>", "</arg_key>", "<arg_value>"))
    for key, value, is_needed in _members(schema):
        inner = _value(lark, value, schema, "</arg_value>", _NOT_IN_GLM_VALUE)
        head = f"{key_tag} {literal(key)} {key_end} {literal(chr(10))} {value_tag}"
        parts.append(_optional(f"{head} {inner} {literal(chr(10))}", is_needed))
    return " ".join([*parts, lark.token(CLOSE)])


def _members(schema: Schema) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name, the schema and the need of each parameter, in the order of the schema."""
    properties, required = schema.get("properties"), schema.get("required")
    for key, value in (properties if isinstance(properties, dict) else {}).items():
        yield key, value, isinstance(required, list) and key in required


def _optional(expression: str, is_needed: bool) -> str:
    return expression if is_needed else f"({expression})?"


def _value(lark: Lark, value: Any, root: Schema, end: str, forbidden: str) -> str:
    """Return a value and its end.  A text is any that has no tag, or one of its `enum`; all else is JSON."""
    types = value_types(value, root)
    closing = literal(end) if end.startswith("\n") else lark.token(end)
    if types is not None and "string" not in types:
        return f"{json_value(value | definitions(root))} {closing}"
    choices = value.get("enum", [value["const"]] if "const" in value else None) if isinstance(value, dict) else None
    if types == {"string"} and isinstance(choices, list) and all(isinstance(each, str) for each in choices):
        return f"{one_of(literal(each) for each in choices if each)} {closing}"
    return _text(lark, end, forbidden)


def definitions(root: Schema) -> Schema:
    """Return the parts of a schema that references in its members may name."""
    return {name: root[name] for name in ("$defs", "definitions") if name in root}


def _text(lark: Lark, end: str, forbidden: str) -> str:
    """Return a text without tags, and its end, as one terminal: a terminal takes as much as it can."""
    if (token := lark.special(end)) is not None:
        return f"{lark.terminal(f'/(?s:.*)/ & ~/(?s:.*)({forbidden})(?s:.*)/')} {token}"
    tag = end.strip("\n").replace("/", r"\/")
    closed = end.replace("\n", r"\n").replace("/", r"\/")
    return lark.terminal(f"/(?s:.*){closed}/ & ~/(?s:.*)({forbidden})(?s:.*)/ & ~/(?s:.*){tag}(?s:.*){tag}(?s:.*)/")

"""Calls whose arguments are JSON: of Hermes and Qwen, Llama 3, DeepSeek-V3 and Kimi-K2.

Each function reads one call from behind the marker that opens it, up to the end of the call.  All raise `NotACall`.
"""

from __future__ import annotations

import json
import re

from rollout.http.openai.parsers.json_text import JsonObject, read_object
from rollout.http.openai.parsers.said import ToolCall
from rollout.http.openai.parsers.tagged_calls import Tools
from rollout.http.openai.parsers.text import NotACall, Reading, Text

_LINE = re.compile(r"[^\n<`]*")
_HEAD = re.compile(r"[^<]*")
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?P<index>:[0-9]+)?")


def read_hermes_call(text: Text, tools: Tools) -> Reading[list[ToolCall]]:
    """Read `{"name": ..., "arguments": {...}}` and the closing tag, as Hermes and Qwen 2.5 and 3 write them."""
    yield from text.space()
    found = yield from read_object(text)
    yield from text.space()
    yield from text.expect("</tool_call>")
    return [_call_of(found, needs_arguments=False)]


def read_llama_call(text: Text, tools: Tools) -> Reading[list[ToolCall]]:
    """Read `{"name": ..., "parameters": {...}}`, which has no closing tag, as Llama 3 writes it."""
    yield from text.space()
    return [_call_of((yield from read_object(text)), needs_arguments=True)]


def read_deepseek_call(text: Text, tools: Tools) -> Reading[list[ToolCall]]:
    """Read the name, a separator and the arguments, as DeepSeek-V3.1 writes them.

    DeepSeek-V3 writes the kind of tool before the separator, and behind it the name and a fenced block of JSON.
    """
    name = yield from text.run(_HEAD)
    yield from text.expect("<｜tool▁sep｜>")
    yield from text.space()
    is_fenced = (yield from text.goes_on("{")) is None
    if is_fenced:
        name = yield from text.run(_LINE)
        yield from text.space()
        yield from text.expect("```json")
        yield from text.space()
    arguments = (yield from read_object(text)).written
    yield from text.space()
    if is_fenced:
        yield from text.expect("```")
        yield from text.space()
    yield from text.expect("<｜tool▁call▁end｜>")
    return [ToolCall(_given(name), arguments)]


def read_kimi_call(text: Text, tools: Tools) -> Reading[list[ToolCall]]:
    """Read `functions.NAME:INDEX`, which is the id of the call, and the arguments, as Kimi-K2 writes them."""
    written = _given((yield from text.run(_HEAD)))
    yield from text.expect("<|tool_call_argument_begin|>")
    yield from text.space()
    arguments = (yield from read_object(text)).written
    yield from text.space()
    yield from text.expect("<|tool_call_end|>")
    parts = _KIMI_ID.fullmatch(written)
    if parts is None:
        raise NotACall
    return [ToolCall(parts["name"], arguments, written if parts["index"] else None)]


def _given(name: str) -> str:
    """Return a name as it can be sent.  Raises `NotACall` if it is empty, or holds half of a character."""
    name = name.strip()
    if not name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise NotACall
    return name


def _call_of(found: JsonObject, *, needs_arguments: bool) -> ToolCall:
    """Return the call that an object holds.  Raises `NotACall` if it lacks a name, or its arguments are not an object.

    The arguments stay as they are written, digit by digit.
    """
    name = json.loads(found.members.get("name", "null"))
    arguments = found.members.get("arguments", found.members.get("parameters", "" if needs_arguments else "{}"))
    if not isinstance(name, str) or not arguments.startswith("{"):
        raise NotACall
    return ToolCall(_given(name), arguments)

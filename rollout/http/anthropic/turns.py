"""Turns of Anthropic's form, with their blocks, as messages that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.known_fields import shown


def chat_messages(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns as messages: a result of a tool becomes a message of its own.  Raises `BadRequest`.

    A message of a result carries the name of the tool that was called, where an earlier turn has the call.
    """
    if not turns:
        raise BadRequest("messages is empty")
    called: dict[str, str] = {}
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        place = f"messages[{index}]"
        role = turn.get("role")
        if role == "assistant":
            messages.append(_assistant(turn.get("content"), place, called))
        elif role in ("user", "system"):
            messages += _spoken(role, turn.get("content"), place, called)
        else:
            raise BadRequest(f"{place}.role must be user, assistant or system")
    return messages


def joined_text(content: Any, place: str) -> str:
    """Return text, or the texts of text blocks one after the other.  Raises `BadRequest` for all else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_text(block, at) for at, block in _blocks(content, place))


def _spoken(role: str, content: Any, place: str, called: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn of the user: texts between results of tools stay between them."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts: list[str] = []
    is_empty = True
    for at, block in _blocks(content, place):
        if block.get("type") != "tool_result":
            texts.append(_text(block, at))
            continue
        if texts:
            yield {"role": role, "content": "".join(texts)}
            texts = []
        call_id = _string(block, "tool_use_id", at)
        named = {"name": called[call_id]} if call_id in called else {}
        is_empty = False
        result = joined_text(block.get("content"), f"{at}.content")
        yield {"role": "tool", "tool_call_id": call_id, **named, "content": result}
    if texts or is_empty:
        yield {"role": role, "content": "".join(texts)}


def _assistant(content: Any, place: str, called: dict[str, str]) -> dict[str, Any]:
    """Return the message of an assistant's turn, and note its calls in `called`."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for at, block in _blocks(content, place):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif kind == "tool_use":
            name, call_id, given = _string(block, "name", at), _string(block, "id", at), block.get("input")
            if not isinstance(given, dict):
                raise BadRequest(f"{at}.input must be an object")
            called[call_id] = name
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            texts.append(_text(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each block, and the block.  Raises `BadRequest` unless they are a list of objects."""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        name = place if place == "system" or place.endswith(".content") else f"{place}.content"
        raise BadRequest(f"{name} must be text or a list of blocks")
    for index, block in enumerate(content):
        yield f"{place}[{index}]" if place.endswith(".content") else f"{place}.content[{index}]", block


def _text(block: dict[str, Any], place: str) -> str:
    if block.get("type") != "text":
        raise UnsupportedFeature(
            f"{place} has the type {shown(str(block.get('type')))}; this server takes text, thinking, tool_use and "
            "tool_result"
        )
    return _string(block, "text", place)


def _string(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{place}.{name} must be text")
    return value

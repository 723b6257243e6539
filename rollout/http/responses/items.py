"""Items of OpenAI's Responses form as messages that chat templates take."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.known_fields import shown

Message = dict[str, Any]
_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_THOUGHT, _TEXT, _CALL, _OVER = range(4)  # how far a message of the assistant has come
_TEXTS = ("input_text", "output_text", "text", "refusal")


def item_messages(given: str | list[dict[str, Any]], before: list[Message]) -> list[Message]:
    """Return the messages of an `input` after the earlier ones.  Raises `BadRequest`.

    A thought, a text and calls that follow each other are one message of the assistant.  A result of a call carries
    the name of the function, where its call is there.
    """
    if isinstance(given, str):
        return [*before, {"role": "user", "content": given}]
    reader = _Reader(before)
    for index, item in enumerate(given):
        reader.take(item, f"input[{index}]")
    return reader.messages


class _Reader:
    def __init__(self, before: list[Message]) -> None:
        self.messages = list(before)
        self._names = {
            call["id"]: call["function"]["name"] for message in before for call in message.get("tool_calls", ())
        }
        self._stage = _OVER

    def take(self, item: dict[str, Any], place: str) -> None:
        """Add an item.  Raises `BadRequest`."""
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, place)
        elif kind == "reasoning":
            self._assistant(_THOUGHT)["reasoning_content"] = _thought(item, place)
        elif kind == "function_call":
            call_id, name = _string(item, "call_id", place), _string(item, "name", place)
            self._names[call_id] = name
            function = {"name": name, "arguments": _string(item, "arguments", place)}
            calls = self._assistant(_CALL).setdefault("tool_calls", [])
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind == "function_call_output":
            call_id = _string(item, "call_id", place)
            named = {"name": self._names[call_id]} if call_id in self._names else {}
            content = _text(item.get("output"), f"{place}.output")
            self._add({"role": "tool", "tool_call_id": call_id, **named, "content": content})
        else:
            raise UnsupportedFeature(
                f"{place} has the type {shown(str(kind))}; this server takes message, reasoning, function_call and "
                "function_call_output"
            )

    def _message(self, item: dict[str, Any], place: str) -> None:
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise BadRequest(f"{place}.role must be user, assistant, system or developer")
        content = _text(item.get("content"), f"{place}.content")
        if role == "assistant":
            self._assistant(_TEXT)["content"] = content
        else:
            self._add({"role": role, "content": content})

    def _assistant(self, stage: int) -> Message:
        """Return the assistant's message that takes an item of this stage: a new one where the last one is past it."""
        if stage < self._stage or stage == self._stage != _CALL:
            self._add({"role": "assistant", "content": ""})
        self._stage = stage
        return self.messages[-1]

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self._stage = _OVER


def _thought(item: dict[str, Any], place: str) -> str:
    """Return the text of a thought: its content, else what `sealed` made, else its summary."""
    if item.get("content"):
        return _text(item["content"], f"{place}.content", ("reasoning_text",))
    if item.get("encrypted_content") is not None:
        return _opened(_string(item, "encrypted_content", place), place)
    return _text(item.get("summary", []), f"{place}.summary", ("summary_text",))


def sealed(thought: str) -> str:
    """Return a thought as `encrypted_content`, which clients send back as it is.  It is not encrypted."""
    return base64.b64encode(thought.encode()).decode()


def _opened(text: str, place: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        raise BadRequest(f"{place}.encrypted_content is not of this server") from None


def _text(content: Any, place: str, kinds: tuple[str, ...] = _TEXTS) -> str:
    """Return text, or the texts of its parts one after the other.  Raises `BadRequest` for all else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place} must be text or a list of parts")
    return "".join(_texts(content, place, kinds))


def _texts(parts: list[Any], place: str, kinds: tuple[str, ...]) -> Iterator[str]:
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise UnsupportedFeature(f"{place}[{index}] is not text; this server takes text only")
        yield _string(part, "refusal" if kind == "refusal" else "text", f"{place}[{index}]")


def _string(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{place}.{name} must be text")
    return value

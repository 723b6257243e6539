"""Messages and variables of chats, as templates take them."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.core.errors import BadRequest, UnsupportedFeature


def template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Return a client's variables for the chat template.  Raises `UnsupportedFeature` for what steers the rendering."""
    reserved = {"tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "messages", "tools"}
    refused = reserved & variables.keys()
    if refused:
        raise UnsupportedFeature(f"chat_template_kwargs may not set {', '.join(sorted(refused))}")
    return variables


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates take them: content as text, arguments of calls as objects.  Raises `BadRequest`.

    Content that is null stays null next to calls, because some templates treat an empty text differently.
    """
    if not messages:
        raise BadRequest("messages is empty")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"messages[{index}] has no role")
    if isinstance(message.get("tool_calls"), list):
        message = message | {"tool_calls": [_with_arguments(call) for call in message["tool_calls"]]}
    content = message.get("content")
    if content is None:
        return message if "content" in message and message.get("tool_calls") else message | {"content": ""}
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise BadRequest(f"messages[{index}].content must be text or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"messages[{index}].content holds a part that is not text; this server takes text only")
        texts.append(part["text"])
    return message | {"content": "".join(texts)}


def _with_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as templates take them.  Clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return call | {"function": function | {"arguments": CallArguments(arguments, function["arguments"])}}


class CallArguments(dict[str, Any]):
    """Arguments of a call: an object for most templates, and text for templates that join it to text, as DeepSeek's."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text

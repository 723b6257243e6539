"""Messages of turns: what tells two conversations apart, and the thoughts that clients leave out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from rollout.http.chat_messages import plain_messages

Message = dict[str, Any]
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thought."""


def answer_message(delta: dict[str, Any]) -> Message:
    """Return an answer as the message that it is for the next turn."""
    message: Message = {"role": "assistant", "content": delta["content"]}
    for name in ("reasoning_content", "tool_calls"):
        if delta.get(name):
            message[name] = delta[name]
    (plain,) = plain_messages([message])
    return plain


def thoughts_of(messages: list[Message], first: int) -> dict[int, str]:
    """Return the thoughts of messages from the index `first` on."""
    return {
        index: message["reasoning_content"]
        for index, message in enumerate(messages[first:], start=first)
        if isinstance(message.get("reasoning_content"), str)
    }


def has_thoughts(messages: list[Message], known: dict[int, str]) -> bool:
    """Return whether no message has another thought than the known one.  A client may leave thoughts out."""
    given = ((index, _thought(message)) for index, message in enumerate(messages))
    return all(thought in ("", known.get(index, "").strip()) for index, thought in given)


def _thought(message: Message) -> str:
    """Return the thought of a message under any name that templates read, without spaces around it."""
    return str(next((message[name] for name in _THOUGHTS if message.get(name)), "")).strip()


def with_thoughts(messages: list[Message], thoughts: dict[int, str]) -> list[Message]:
    """Return `messages` with the known thoughts, by index, where a client left them out."""
    return [
        message | {"reasoning_content": thoughts[index]} if index in thoughts and not _thought(message) else message
        for index, message in enumerate(messages)
    ]


def keys_of(context: bytes, messages: list[Message]) -> Iterator[bytes]:
    """Yield the digest of the first message, of the first two, and so on, under the digest of all else."""
    key = context
    for message in messages:
        key = digest(key, _content_of(message))
        yield key


def _content_of(message: Message) -> Any:
    """Return what two forms of one message share.

    An answer comes back with new ids of its calls, and often without thoughts or with fields of a client's own.  All
    else comes back as it was, but for marks of a cache.
    """
    if message["role"] != "assistant":
        return {name: value for name, value in message.items() if name not in ("cache_control", "content")} | {
            "content": message.get("content") or ""
        }
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        functions = [call.get("function") if isinstance(call, dict) else call for call in calls]
        calls = [
            [function.get("name"), function.get("arguments")] if isinstance(function, dict) else function
            for function in functions
        ]
    return ["assistant", message.get("content") or "", calls or [], message.get("name")]


def digest(before: bytes, content: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(content, sort_keys=True).encode()).digest()


def continued(messages: list[Message], answer: Message) -> list[Message]:
    """Return the conversation whose last message goes on with an answer."""
    *earlier, begun = messages
    whole = begun | answer | {"content": (begun.get("content") or "") + (answer["content"] or "")}
    if thought := str(begun.get("reasoning_content") or "") + answer.get("reasoning_content", ""):
        whole["reasoning_content"] = thought
    return [*earlier, whole]

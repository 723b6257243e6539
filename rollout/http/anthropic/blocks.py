"""Native responses as messages of Anthropic's form, whole and as events.

A message is a list of blocks.  A whole message is the blocks that its events make.  It has its text in one block before
its calls, while a stream has text that follows a call in a block of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from rollout.http.answers import Native, ignored_fields, token_record, version_info
from rollout.http.openai.messages import ChatMessage, SpokenParts
from rollout.http.openai.protocol import ChatCompletionRequest

Event = dict[str, Any]


class MessageBlocks:
    """The blocks of one message as its text comes, and the events that tell of them."""

    def __init__(self, message: ChatMessage) -> None:
        self._parts = SpokenParts(message)
        self._index = -1
        self._open: str | None = None  # the type of the block that goes on

    def events(self, native: Native) -> Iterator[Event]:
        """Yield the events of the new part of a response, which has all of the text so far."""
        for kind, part in self._parts.new(native):
            if kind == "thought":
                yield from self._piece("thinking", {"thinking": "", "signature": ""}, "thinking_delta", thinking=part)
            elif kind == "text":
                yield from self._piece("text", {"text": ""}, "text_delta", text=part)
            else:
                yield from self._close()
                start = {"id": part["id"], "name": part["function"]["name"], "input": {}}
                arguments = part["function"]["arguments"]
                yield from self._piece("tool_use", start, "input_json_delta", partial_json=arguments)
                yield from self._close()
        if native["meta_info"]["finish_reason"] is not None:
            yield from self._close()

    @property
    def calls_tools(self) -> bool:
        """True if the message has calls so far."""
        return self._parts.message.num_calls > 0

    def _piece(self, kind: str, start: dict[str, Any], delta: str, **content: str) -> Iterator[Event]:
        """Yield a piece of a block of this kind, which begins where another one was open."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **start}}
        yield {"type": "content_block_delta", "index": self._index, "delta": {"type": delta, **content}}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None


def whole_message(chat: ChatCompletionRequest, blocks: MessageBlocks, model: str, native: Native) -> dict[str, Any]:
    """Return the message of a finished response."""
    content: list[dict[str, Any]] = []
    for event in blocks.events(native):
        if event["type"] == "content_block_start":
            content.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            _add(content[-1], event["delta"])
    head = message_head(native["meta_info"]["id"], model)
    return head | {"content": content} | ending(chat, blocks, native) | {"usage": usage(native)} | extras(chat, native)


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["input"] = msgspec.Raw(delta["partial_json"].encode())  # as it was written
    else:
        name = "text" if delta["type"] == "text_delta" else "thinking"
        block[name] += delta[name]


def message_head(rid: str, model: str) -> dict[str, Any]:
    """Return a message without content, before its end."""
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    return {"id": rid, "type": "message", "role": "assistant", "model": model} | empty


def ending(chat: ChatCompletionRequest, blocks: MessageBlocks, native: Native) -> dict[str, Any]:
    """Return why the message ended.  An aborted one has the reason `abort`, which is not Anthropic's."""
    meta = native["meta_info"]
    kind, matched = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
    if kind == "length":
        is_full = meta["completion_tokens"] < (chat.max_tokens or 0)
        kind = "model_context_window_exceeded" if is_full else "max_tokens"
    elif isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    elif kind == "stop":
        kind = "tool_use" if blocks.calls_tools else "end_turn"
    return {"stop_reason": kind, "stop_sequence": None}


def usage(native: Native) -> dict[str, int]:
    """Count the tokens of a finished response.  Prompt tokens from the prefix cache are counted by themselves."""
    meta = native["meta_info"]
    return {
        "input_tokens": meta["prompt_tokens"] - meta["cached_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": meta["cached_tokens"],
        "output_tokens": meta["completion_tokens"],
    }


def extras(chat: ChatCompletionRequest, native: Native) -> dict[str, Any]:
    """Return our own fields of a finished response: versions, unknown fields of the request, the token record."""
    record = {"token_record": token_record(native)} if chat.return_token_record else {}
    return {"version_info": version_info(native)} | ignored_fields(native) | record

"""Native responses in OpenAI's Responses form: output items, whole and as events, and the response around them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from rollout.http.answers import Native, ignored_fields, token_record, version_info
from rollout.http.openai.messages import ChatMessage, SpokenParts
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.http.responses.items import Message, sealed
from rollout.http.responses.protocol import SEALED, ResponsesRequest

Event = dict[str, Any]
_ITEMS = {"thought": ("reasoning", "rs"), "text": ("message", "msg"), "call": ("function_call", "fc")}
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "thought": ("response.reasoning_text", {"type": "reasoning_text", "text": ""}),
    "text": ("response.output_text", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
}
_MORE: dict[str, dict[str, Any]] = {"thought": {}, "text": {"logprobs": []}}


class OutputItems:
    """The items of one answer as its text comes, and the events that tell of them.

    `items` are all that began; the last one may be open, with its text so far.
    """

    def __init__(self, message: ChatMessage, *, seals: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._parts = SpokenParts(message)
        self._seals = seals
        self._open: str | None = None  # the kind of the last item, if it goes on

    def events(self, native: Native) -> Iterator[Event]:
        """Yield the events of the new part of a response, which has all of the text so far."""
        for kind, part in self._parts.new(native):
            if kind == "call":
                yield from self._call(part)
                continue
            if self._open != kind:
                yield from self._close("completed")
                yield from self._begin(kind)
            item = self.items[-1]
            item["content"][0]["text"] += part
            yield self._of_part(f"{_PARTS[kind][0]}.delta", delta=part, **_MORE[kind])
        reason = native["meta_info"]["finish_reason"]
        if reason is not None:
            yield from self._close("completed" if reason["type"] == "stop" else "incomplete")

    def _begin(self, kind: str) -> Iterator[Event]:
        item = self._item(kind, status="in_progress", content=[])
        if kind == "text":
            item["role"] = "assistant"
        else:
            item |= {"summary": []}
        self._open = kind
        yield self._of_item("response.output_item.added")
        item["content"].append(dict(_PARTS[kind][1]))
        yield self._of_part("response.content_part.added", part=dict(_PARTS[kind][1]))

    def _close(self, status: str) -> Iterator[Event]:
        kind, self._open = self._open, None
        if kind is None:
            return
        item = self.items[-1]
        part = item["content"][0]
        yield self._of_part(f"{_PARTS[kind][0]}.done", text=part["text"], **_MORE[kind])
        yield self._of_part("response.content_part.done", part=part)
        item["status"] = status
        if kind == "thought" and self._seals:
            item["encrypted_content"] = sealed(part["text"])
        yield self._of_item("response.output_item.done")

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a call, which comes whole."""
        yield from self._close("completed")
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = self._item("call", status="in_progress", call_id=call["id"], name=name, arguments="")
        yield self._of_item("response.output_item.added")
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments}
        item |= {"arguments": arguments, "status": "completed"}
        yield self._of_item("response.output_item.done")

    def _item(self, kind: str, **fields: Any) -> dict[str, Any]:
        name, prefix = _ITEMS[kind]
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "type": name, **fields})
        return self.items[-1]

    def _of_item(self, kind: str) -> Event:
        item = self.items[-1]
        shown = item | ({"content": list(item["content"])} if "content" in item else {})
        return {"type": kind, "output_index": len(self.items) - 1, "item": shown}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return {"type": kind, **place, **fields}

    @property
    def thoughts(self) -> str:
        """The text of all thoughts."""
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def message(self) -> Message:
        """Return the answer as the message that it is for the next turn."""
        texts = [item["content"][0]["text"] for item in self.items if item["type"] == "message"]
        made: Message = {"role": "assistant", "content": "".join(texts)}
        if self.thoughts:
            made["reasoning_content"] = self.thoughts
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self.items
            if item["type"] == "function_call"
        ]
        return made | ({"tool_calls": calls} if calls else {})


def begun(body: ResponsesRequest, chat: ChatCompletionRequest, rid: str, model: str, created: int) -> dict[str, Any]:
    """Return the response before its first token."""
    return {
        "id": rid,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata,
        **({"background": True} if body.background else {}),
    }


def ended(
    head: dict[str, Any], chat: ChatCompletionRequest, items: OutputItems, native: Native, num_thought: int
) -> Event:
    """Return the response after its last token.  `num_thought`: the tokens of its thoughts.

    An aborted one is incomplete for the reason `abort`, which is not OpenAI's.
    """
    meta = native["meta_info"]
    kind = meta["finish_reason"]["type"]
    incomplete = None if kind == "stop" else {"reason": "max_output_tokens" if kind == "length" else kind}
    usage = {
        "input_tokens": meta["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": meta["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": meta["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": meta["prompt_tokens"] + meta["completion_tokens"],
    }
    ending = {
        "status": "completed" if incomplete is None else "incomplete",
        "incomplete_details": incomplete,
        "output": items.items,
        "usage": usage,
        "version_info": version_info(native),
    }
    record = {"token_record": token_record(native)} if chat.return_token_record else {}
    return head | ending | ignored_fields(native) | record


def seals_thoughts(body: ResponsesRequest) -> bool:
    """Return whether thoughts carry `encrypted_content`, for clients that give back nothing else of them."""
    return SEALED in body.include

"""Texts of answers as the messages of chats: with reasoning and tool calls apart, where parsers are configured.

The formats of models are in `parsers`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollout.core.errors import StartupError
from rollout.entrypoints.openai_protocol import ChatCompletionRequest
from rollout.entrypoints.parsers.answer import AnswerParser
from rollout.entrypoints.parsers.reasoning import REASONING_FORMATS
from rollout.entrypoints.parsers.tool_calls import TOOL_CALL_READERS, ToolCall
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.validation import check_token_ids

PROMPT_TAIL = 16
"""Tokens at the end of a prompt that may hold the marker of a thought, spelled out."""

Kind = TypeVar("Kind")


class ChatMessage:
    """One choice's message, from text as it comes."""

    def __init__(self, parser: AnswerParser, *, shows_reasoning: bool, streams_reasoning: bool) -> None:
        self.num_calls = 0
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self._streams_reasoning = streams_reasoning
        self._held_reasoning = ""

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """What `text` adds to the message; a tool call comes whole, once it is complete."""
        pieces = [self._parser.feed(text)] + ([self._parser.finish()] if is_last else [])
        delta: dict[str, Any] = {"content": "".join(piece.content for piece in pieces)}
        self._held_reasoning += "".join(piece.reasoning for piece in pieces)
        is_shown = self._streams_reasoning or is_last or not self._parser.is_thinking
        if self._held_reasoning and is_shown:
            if self._shows_reasoning:
                delta["reasoning_content"] = self._held_reasoning
            self._held_reasoning = ""
        if calls := [call for piece in pieces for call in piece.calls]:
            delta["tool_calls"] = [self._call(call) for call in calls]
        return delta

    def _call(self, call: ToolCall) -> dict[str, Any]:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class ChatMessages:
    """Makes the messages of a server's answers, with the parsers that it was started with."""

    def __init__(self, manager: TokenizerManager) -> None:
        """Raises `StartupError` for a parser that does not exist."""
        args = manager.server_args
        self._manager = manager
        self._read_call = _named(TOOL_CALL_READERS, "--tool-call-parser", args.tool_call_parser)
        self._reasoning_format = _named(REASONING_FORMATS, "--reasoning-parser", args.reasoning_parser)

    def maker(self, body: ChatCompletionRequest, prompt_ids: list[int]) -> Callable[[], ChatMessage]:
        """What makes the messages that answer `body`, whose prompt has the given ids.

        Raises `BadRequest` for ids that do not exist, and for messages that are none.
        """
        tools = body.template_tools() or []
        format_ = self._reasoning_format if body.separate_reasoning else None
        in_thought = False
        if format_ is not None:
            tail = prompt_ids[-PROMPT_TAIL:]
            check_token_ids(tail, self._manager.limits.vocab_size, "input_ids")
            text = self._manager.tokenizer.decode(tail, skip_special_tokens=False)
            in_thought = format_.begins_in_thought(text, body.begun_answer())
        read_call = self._read_call if tools else None
        return lambda: ChatMessage(
            AnswerParser(format_, read_call, tools, in_thought=in_thought),
            shows_reasoning=body.include_reasoning,
            streams_reasoning=body.stream_reasoning,
        )


def _named(table: Mapping[str, Kind], flag: str, name: str | None) -> Kind | None:
    if name is None:
        return None
    if name not in table:
        raise StartupError(f"{flag} {name} is not known: there are {', '.join(sorted(table))}")
    return table[name]

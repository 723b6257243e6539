"""Texts of answers as the messages of chats: with reasoning and tool calls apart, where parsers are configured.

The formats of models are in `parsers`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from rollout.core.errors import BadRequest, StartupError, UnsupportedFeature
from rollout.core.grammar import Grammar
from rollout.http.answers import Native
from rollout.http.openai.answer_grammar import CallGrammar, Thinking, answer_grammar, forced_tools, strict_tools
from rollout.http.openai.parsers import harmony
from rollout.http.openai.parsers.answer import AnswerParser, names_of
from rollout.http.openai.parsers.lark import Lark
from rollout.http.openai.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from rollout.http.openai.parsers.said import ToolCall
from rollout.http.openai.parsers.tool_calls import TOOL_CALL_READERS, CallFormat
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.validation import check_token_ids

logger = logging.getLogger(__name__)
PROMPT_TAIL = 16
"""Tokens at the end of a prompt that may hold the marker of a thought, spelled out."""

Kind = TypeVar("Kind")


class ChatMessage:
    """One choice's message, from text as it comes."""

    def __init__(
        self, parser: AnswerParser, *, shows_reasoning: bool, streams_reasoning: bool, max_calls: int | None
    ) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._call_ids: set[str] = set()
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self._streams_reasoning = streams_reasoning
        self._held_reasoning = ""

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the part that `text` adds to the message; a tool call comes whole, once it is complete."""
        pieces = [self._parser.feed(text)] + ([self._parser.finish()] if is_last else [])
        delta: dict[str, Any] = {"content": "".join(piece.content for piece in pieces)}
        self._held_reasoning += "".join(piece.reasoning for piece in pieces)
        is_shown = self._streams_reasoning or is_last or not self._parser.is_thinking
        if self._held_reasoning and is_shown:
            if self._shows_reasoning:
                # SGLang's name, and vLLM's.
                delta |= {"reasoning_content": self._held_reasoning, "reasoning": self._held_reasoning}
            self._held_reasoning = ""
        calls = [call for piece in pieces for call in piece.calls]
        if self._max_calls is not None:
            calls = calls[: self._max_calls - self.num_calls]
        if calls:
            delta["tool_calls"] = [self._call(call) for call in calls]
        return delta

    def _call(self, call: ToolCall) -> dict[str, Any]:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": self._call_id(call), "type": "function", "function": function}

    def _call_id(self, call: ToolCall) -> str:
        """Return the model's own id of a call, or a new one if it gave none or gave it twice."""
        call_id = call.id
        if call_id is None or call_id in self._call_ids:
            call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._call_ids.add(call_id)
        return call_id


class SpokenParts:
    """The parts of one message in the order in which its text came: thoughts, text and calls."""

    def __init__(self, message: ChatMessage) -> None:
        self.message = message
        self._num_chars = 0

    def new(self, native: Native) -> Iterator[tuple[str, Any]]:
        """Yield what is new in a response, which has all of the text so far.

        The pairs are ("thought", text), ("text", text) and ("call", call as OpenAI has it).  What came together is
        in this order.
        """
        text: str = native.get("text", "")
        is_last = native["meta_info"]["finish_reason"] is not None
        delta = self.message.delta(text[self._num_chars :], is_last=is_last)
        self._num_chars = len(text)
        if thought := delta.get("reasoning_content"):
            yield "thought", thought
        if delta["content"]:
            yield "text", delta["content"]
        for call in delta.get("tool_calls", ()):
            yield "call", call


class ChatMessages:
    """Makes the messages of a server's answers, with the parsers that it was started with."""

    def __init__(self, manager: TokenizerManager) -> None:
        """Find the parsers that the settings name.

        Raises `StartupError` for a parser that does not exist, or two that do not go together.
        """
        args = manager.server_args
        self._manager = manager
        self._call_format = _named(TOOL_CALL_READERS, "--tool-call-parser", args.tool_call_parser)
        self._reasoning_format = _named(REASONING_FORMATS, "--reasoning-parser", args.reasoning_parser)
        formats = [each for each in (self._call_format, self._reasoning_format) if each is not None]
        self._has_warned = False
        self._is_harmony = any(each.is_harmony for each in formats)
        if self._is_harmony and not all(each.is_harmony for each in formats):
            raise StartupError(
                f"--tool-call-parser {args.tool_call_parser} does not go with --reasoning-parser "
                f"{args.reasoning_parser}: the harmony format of gpt-oss has both or none"
            )

    def kept_tokens(self, body: ChatCompletionRequest) -> tuple[str, ...]:
        """Return the special tokens that the parsers of the answer to `body` have to see in its text."""
        reasoning_format, call_format = self._formats(body)
        kept = [*harmony.MARKERS] if self._is_harmony else []
        kept += [] if reasoning_format is None else [*reasoning_format.markers]
        kept += [] if call_format is None else [*call_format.markers]
        return tuple(kept)

    def end_ids(self) -> list[int]:
        """Return the ids of the tokens that end a turn besides the model's own."""
        call_ends = () if self._call_format is None else self._call_format.ends
        return sorted(self._manager.token_ids_of(harmony.ENDS_OF_TURN if self._is_harmony else call_ends))

    def _formats(self, body: ChatCompletionRequest) -> tuple[ReasoningFormat | None, CallFormat | None]:
        """Return the formats of reasoning and calls by which the answer to `body` is read; None: as plain text."""
        return (
            self._reasoning_format if body.separate_reasoning else None,
            self._call_format if body.template_tools() else None,
        )

    def maker(self, body: ChatCompletionRequest, prompt_ids: list[int]) -> Callable[[], ChatMessage]:
        """Return a maker of the messages that answer `body`, whose prompt has the given ids.

        Raises `BadRequest` for ids that do not exist, and for invalid messages.
        """
        tools = body.template_tools() or []
        format_, call_format = self._formats(body)
        in_thought = self._thinking(format_, body, prompt_ids).is_open
        names = names_of(tools)
        return lambda: ChatMessage(
            AnswerParser(
                format_,
                call_format,
                tools,
                function_names=names,
                in_thought=in_thought,
                is_harmony=self._is_harmony,
            ),
            shows_reasoning=body.include_reasoning,
            streams_reasoning=body.stream_reasoning,
            max_calls=None if body.parallel_tool_calls else 1,
        )

    def grammar(self, body: ChatCompletionRequest, prompt_ids: list[int]) -> Grammar | None:
        """Return the grammar of the answer to `body`, None if nothing binds it.  Raises what refuses it."""
        text, forced = body.grammar(), forced_tools(body.tool_choice, body.tools)
        strict = body.strict_names() if self._why_unbound(text) is None and body.template_tools() else frozenset()
        if text is None and forced is None and not strict:
            return None
        if forced is not None and self._call_format is None:
            raise UnsupportedFeature("a tool_choice that forces a call needs a server with --tool-call-parser")
        if forced is not None and text is not None:
            raise BadRequest("tool_choice forces a call, and the request has a grammar for its text: give one of both")
        calls = None
        if self._call_format is not None and (tools := forced or body.template_tools()):
            has_many = body.parallel_tool_calls and not isinstance(body.tool_choice, dict)
            is_free = forced is None and text is None
            if is_free:
                tools = strict_tools(tools, strict, self._call_format)
            calls = CallGrammar(self._call_format, tools, has_many, is_free=is_free)
        thinking = self._thinking(self._reasoning_format, body, prompt_ids)
        return answer_grammar(self._lark(), text, calls, thinking, is_harmony=self._is_harmony)

    def unbound(self, body: ChatCompletionRequest) -> list[str]:
        """Return the fields of `body` that have no effect, as its calls cannot be bound: `tools.strict`, or none.

        Such a chat is answered, as agents send the field unasked.  Raises `UnsupportedFeature` under --strict-requests.
        """
        if not body.template_tools() or not body.strict_names():
            return []
        reason = self._why_unbound(body.grammar())
        if reason is None:
            return []
        if self._manager.server_args.strict_requests:
            raise UnsupportedFeature(f"strict of a tool has no effect: {reason}")
        if not self._has_warned:
            self._has_warned = True
            logger.warning("strict of a tool has no effect: %s", reason)
        return ["tools.strict"]

    def _why_unbound(self, text: Grammar | None) -> str | None:
        """Return why strict tools do not bind their calls, in an answer whose text follows `text`; None if they do."""
        if self._call_format is None:
            return "the server has no --tool-call-parser"
        if not self._manager.restrictions.has_grammars:
            return "grammars need a tokenizer and the package llguidance: pip install 'lockstep-rl[grammar]'"
        if text is not None and text.kind in ("ebnf", "structural_tag"):
            return "the request has a grammar of its own"
        return None

    def _thinking(
        self, format_: ReasoningFormat | None, body: ChatCompletionRequest, prompt_ids: list[int]
    ) -> Thinking:
        if format_ is None:
            return Thinking()
        tail = prompt_ids[-PROMPT_TAIL:]
        check_token_ids(tail, self._manager.limits.vocab_size, "input_ids")
        text = self._manager.tokenizer.decode(tail, skip_special_tokens=False)
        begun = body.begun_answer()
        return Thinking(format_.begins_in_thought(text, begun), format_.may_begin(text, begun))

    def _lark(self) -> Lark:
        vocabulary = self._manager.tokenizer.vocabulary
        return Lark(
            lambda token: next(iter(self._manager.token_ids_of([token])), None),
            lambda token_id: token_id in vocabulary.special_ids,
        )


def _named(table: Mapping[str, Kind], flag: str, name: str | None) -> Kind | None:
    if name is None:
        return None
    if name not in table:
        raise StartupError(f"{flag} {name} is not known: there are {', '.join(sorted(table))}")
    return table[name]

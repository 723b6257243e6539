"""Bodies of /v1/messages and /v1/messages/count_tokens, and the chats that they are.

Answers are in `blocks`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.known_fields import HARMLESS_OPENAI_FIELDS, UNSUPPORTED_GENERATE_FIELDS, shown
from rollout.http.anthropic.turns import chat_messages, joined_text
from rollout.http.generation import AnyGeneration, RecordFields, SamplingFields
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.http.protocol import Body, FreeForm, FreeObject, Messages, TokenIds, Tools

_HARMLESS = HARMLESS_OPENAI_FIELDS | {
    # where and for whom a request is computed, and marks for a cache that is kept here without them
    *("cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id", "betas"),
}
_UNSUPPORTED = UNSUPPORTED_GENERATE_FIELDS | {
    *("container", "mcp_servers", "context_management", "fallbacks", "prefill", "prompt_logprobs"),
}
_SAME = frozenset({*SamplingFields.model_fields, *RecordFields.model_fields, *AnyGeneration.model_fields}) - {
    "stop",
    "stream",
}


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens: the fields that make the prompt."""

    unsupported = _UNSUPPORTED
    harmless = _HARMLESS

    model: str | None = None
    messages: Messages = []
    input_ids: TokenIds | None = None
    system: Annotated[Any, FreeForm] = None
    tools: Tools | None = None
    tool_choice: FreeObject | None = None
    thinking: FreeObject | None = None
    output_config: FreeObject | None = None
    output_format: FreeObject | None = None
    chat_template_kwargs: FreeObject = {}

    def chat(self) -> ChatCompletionRequest:
        """Return the chat.  Raises `BadRequest` or `UnsupportedFeature`, which name the place of a fault."""
        return ChatCompletionRequest(**self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        messages = [] if self.input_ids is not None else chat_messages(self.messages)
        if messages and self.system is not None:
            messages.insert(0, {"role": "system", "content": joined_text(self.system, "system")})
        choice = self.tool_choice or {}
        continues = bool(messages) and messages[-1]["role"] == "assistant"
        return {
            "model": self.model,
            "messages": messages,
            "input_ids": self.input_ids,
            "tools": None if not self.tools else [_function(index, tool) for index, tool in enumerate(self.tools)],
            "tool_choice": _choice(choice),
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
            "chat_template_kwargs": self._thinking() | self.chat_template_kwargs,
            "reasoning_effort": self._effort(),
            "response_format": self._format(),
        }

    def _thinking(self) -> dict[str, bool]:
        """Return the template's variables on thinking.  A budget of tokens is a target there, and nothing here."""
        kind = (self.thinking or {}).get("type")
        if kind not in (None, "enabled", "disabled", "adaptive"):
            raise BadRequest("thinking.type must be enabled, disabled or adaptive")
        if kind in (None, "adaptive"):
            return {}
        return {"enable_thinking": kind == "enabled", "thinking": kind == "enabled"}

    def _format(self) -> dict[str, Any] | None:
        """Return the form of the text, which `output_format` named before `output_config` did.  Raises `BadRequest`."""
        found = [each for each in ((self.output_config or {}).get("format"), self.output_format) if each is not None]
        if len(found) > 1:
            raise BadRequest("give output_config.format or output_format, not both")
        if found and (not isinstance(found[0], dict) or found[0].get("type") != "json_schema"):
            raise BadRequest("output_config.format must be an object of the type json_schema")
        return found[0] if found else None

    def _effort(self) -> str | None:
        config = self.output_config or {}
        effort = config.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise BadRequest("output_config.effort must be text")
        return effort


class MessagesRequest(CountTokensRequest, SamplingFields, RecordFields, AnyGeneration):
    """POST /v1/messages.  Sampling fields of the other dialects count here, too, and so do our own.

    `input_ids` replaces the rendered messages as the prompt.
    """

    unsupported = _UNSUPPORTED
    harmless = _HARMLESS

    max_tokens: Annotated[int, Field(ge=0)]
    stop_sequences: list[str] = []
    rid: str | None = None

    def chat(self) -> ChatCompletionRequest:
        """Return the chat.  Raises `BadRequest` or `UnsupportedFeature`, which name the place of a fault."""
        if self.n != 1:
            raise BadRequest(f"n must be 1: an answer holds one message, got {self.n}")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        fields = {name: getattr(self, name) for name in ("rid", "max_tokens", "stream", *_SAME)}
        chat = ChatCompletionRequest(**self._chat_fields(), **fields, stop=[*self.stop_sequences, *stops])
        chat.unknown = self.unknown
        chat.set_strict(self.tools or ())
        return chat


def _function(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as templates take it.  Raises `UnsupportedFeature` for tools that Anthropic's server runs."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedFeature(f"tools[{index}] has the type {shown(str(kind))}; this server knows custom tools only")
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise BadRequest(f"tools[{index}] must have a name and an input_schema")
    described = {} if tool.get("description") is None else {"description": tool["description"]}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _choice(choice: dict[str, Any]) -> Any:
    """Return a choice of tools in OpenAI's form."""
    kind = choice.get("type")
    if kind in (None, "auto", "none"):
        return kind
    if kind == "any":
        return "required"
    if kind != "tool":
        raise BadRequest("tool_choice.type must be auto, none, any or tool")
    return {"type": "function", "function": {"name": choice.get("name")}}

"""The body of /v1/responses, and the chat that it is.  Answers are in `output`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.known_fields import HARMLESS_OPENAI_FIELDS, UNSUPPORTED_GENERATE_FIELDS, shown
from rollout.http.generation import AnyGeneration, Count, RecordFields, SamplingFields
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.http.protocol import FreeForm, FreeObject, Messages, TokenIds, Tools
from rollout.http.responses.items import Message, item_messages

SEALED = "reasoning.encrypted_content"
_SAME = frozenset({*SamplingFields.model_fields, *RecordFields.model_fields, *AnyGeneration.model_fields}) - {"stream"}


class ResponsesRequest(SamplingFields, RecordFields, AnyGeneration):
    """POST /v1/responses.  Sampling fields of the other dialects count here, too, and so do our own.

    `input_ids` replaces the rendered items as the prompt.
    """

    unsupported = (UNSUPPORTED_GENERATE_FIELDS - {"background"}) | {
        *("conversation", "prompt", "context_management", "moderation", "top_logprobs"),
        *("prompt_logprobs",),
    }
    harmless = HARMLESS_OPENAI_FIELDS | {
        *("stream_options", "max_tool_calls", "client_metadata", "prompt_cache_options", "background_options"),
        *("access_programs", "image"),
    }

    model: str | None = None
    input: Annotated[str | Messages, Field(union_mode="left_to_right")] = []
    input_ids: TokenIds | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    tools: Tools | None = None
    tool_choice: Annotated[Any, FreeForm] = None
    parallel_tool_calls: bool = True
    reasoning: FreeObject = {}
    text: FreeObject = {}
    max_output_tokens: Count | None = None
    include: list[str] = []
    metadata: FreeObject = {}
    truncation: str = "disabled"
    user: str | None = None
    chat_template_kwargs: FreeObject = {}
    rid: str | None = None
    background: bool = False

    def messages(self, before: list[Message]) -> list[Message]:
        """Return the conversation: the messages `before` it, and its own.  Raises `BadRequest`."""
        return item_messages(self.input, before)

    def chat(self, messages: list[Message]) -> ChatCompletionRequest:
        """Return the chat of a conversation.  Raises `BadRequest` or `UnsupportedFeature`."""
        if self.n != 1:
            raise BadRequest(f"n must be 1: an answer holds one response, got {self.n}")
        if self.truncation != "disabled":
            raise UnsupportedFeature("truncation other than disabled is not supported by this server")
        if self.background and not (self.stream and self.store):
            raise UnsupportedFeature("background needs stream: true and store: true: this server keeps streams alone")
        unknown = [name for name in self.include if name != SEALED]
        if unknown:
            raise UnsupportedFeature(f"include may not name {shown(unknown[0])}; return_token_record gives the tokens")
        format_ = self.text.get("format")
        if format_ is not None and not isinstance(format_, dict):
            raise BadRequest("text.format must be an object")
        effort = self.reasoning.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise BadRequest("reasoning.effort must be text")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        own = (
            "model", "input_ids", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "rid", "stream",
        )  # fmt: skip
        chat = ChatCompletionRequest(
            messages=[] if self.input_ids is not None else [*system, *messages],
            tools=[_function(index, tool) for index, tool in enumerate(self.tools or ())] or None,
            reasoning_effort=effort,
            max_completion_tokens=self.max_output_tokens,
            response_format=format_,
            **{name: getattr(self, name) for name in (*own, *_SAME)},
        )
        chat.unknown = self.unknown
        chat.set_strict(self.tools or ())
        return chat


def _function(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as templates take it.  Raises `UnsupportedFeature` for tools that OpenAI's server runs."""
    kind = tool.get("type")
    if kind != "function":
        raise UnsupportedFeature(f"tools[{index}] has the type {shown(str(kind))}; this server knows functions only")
    if not isinstance(tool.get("name"), str):
        raise BadRequest(f"tools[{index}] must have a name")
    given = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": given}

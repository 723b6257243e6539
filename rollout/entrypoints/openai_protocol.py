"""Bodies of /v1/completions and /v1/chat/completions, and what they ask of the engine.

Knows OpenAI's and SGLang's names for sampling parameters.  Does not know responses: `openai_format.py` does.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.entrypoints.protocol import (
    UNSUPPORTED_GENERATE_FIELDS,
    UNSUPPORTED_SAMPLING_FIELDS,
    Body,
    ExtraKey,
    TokenIds,
    combined_extra_key,
)
from rollout.tokenizer_manager.request import GenerateReqInput, RoutesFormat

COMPLETION_MAX_TOKENS = 16

# Wire name -> sampling parameter; a field left at None is not sent on.
_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "no_stop_trim": "no_stop_trim",
    "skip_special_tokens": "skip_special_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "seed": "sampling_seed",
    "n": "n",
}


class StreamOptions(Body):
    include_usage: bool = False


class OpenAIRequest(Body):
    """What both endpoints share."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_GENERATE_FIELDS | UNSUPPORTED_SAMPLING_FIELDS

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    rid: str | None = None
    extra_key: ExtraKey | None = None
    cache_salt: ExtraKey | None = None
    max_kv_version_lag: int | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0
    routed_experts_format: RoutesFormat = "compatible"
    return_meta_info: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False

    @property
    def wants_prompt_token_ids(self) -> bool:
        return self.return_prompt_token_ids or self.return_token_ids

    def _engine_fields(self, max_new_tokens: int | None) -> dict[str, Any]:
        """Fields of `GenerateReqInput` that do not depend on the endpoint."""
        sampling = {name: getattr(self, wire) for wire, name in _SAMPLING_NAMES.items()}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        if max_new_tokens is not None:
            sampling["max_new_tokens"] = max_new_tokens
        return {
            "sampling_params": sampling,
            "rid": self.rid,
            "stream": self.stream,
            "extra_key": combined_extra_key(self.cache_salt, self.extra_key),
            "max_kv_version_lag": self.max_kv_version_lag,
            "return_routed_experts": self.return_routed_experts,
            "routed_experts_start_len": self.routed_experts_start_len,
            "routed_experts_format": self.routed_experts_format,
            "return_prompt_token_ids": self.wants_prompt_token_ids,
            "fill_context": max_new_tokens is None,
        }


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions.  `suffix` and `user` have no effect."""

    prompt: Annotated[str | list[str] | TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
    max_tokens: int = COMPLETION_MAX_TOKENS
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None
    user: str | None = None

    def to_request(self) -> GenerateReqInput:
        """Raises `BadRequest`."""
        if self.best_of is not None and self.best_of != self.n:
            raise BadRequest(f"best_of must equal n ({self.n}): candidates are not ranked, got {self.best_of}")
        prompt = self.prompt
        if isinstance(prompt, list) and not prompt:
            raise BadRequest("prompt is an empty list")
        is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
        wants_logprobs = self.logprobs is not None
        return GenerateReqInput(
            text=prompt if is_text else None,  # type: ignore[arg-type]
            input_ids=None if is_text else prompt,  # type: ignore[arg-type]
            return_logprob=wants_logprobs or self.return_meta_info,
            return_text_in_logprobs=wants_logprobs,
            logprob_start_len=0 if wants_logprobs and self.echo else -1,
            top_logprobs_num=self.logprobs or 0,
            **self._engine_fields(self.max_tokens),
        )


class ChatCompletionRequest(OpenAIRequest):
    """POST /v1/chat/completions.  `input_ids` replaces the rendered messages as the prompt."""

    messages: list[dict[str, Any]] = []
    input_ids: TokenIds | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False
    response_format: dict[str, Any] | None = None
    user: str | None = None

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the template shows to the model, and whose calls are looked for in its answer."""
        return None if self.tool_choice == "none" else self.tools

    def template_messages(self) -> list[dict[str, Any]]:
        """Messages with content parts joined to plain text.  Raises `BadRequest`."""
        if not self.messages:
            raise BadRequest("messages is empty")
        return [_plain_message(index, message) for index, message in enumerate(self.messages)]

    def begun_answer(self) -> str:
        """The beginning of the answer that the prompt holds."""
        return str(self.template_messages()[-1]["content"]) if self.continue_final_message and self.messages else ""

    def to_request(self, prompt_ids: list[int]) -> GenerateReqInput:
        """Raises `BadRequest`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise UnsupportedFeature("response_format other than text is not supported by this server")
        if self.tool_choice not in (None, "auto", "none"):
            raise UnsupportedFeature("tool_choice other than auto and none is not supported by this server")
        if self.tools and not self.parallel_tool_calls:
            raise UnsupportedFeature("parallel_tool_calls: false is not supported by this server")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return GenerateReqInput(
            input_ids=prompt_ids,
            return_logprob=self.logprobs or self.return_meta_info,
            return_text_in_logprobs=self.logprobs,
            top_logprobs_num=self.top_logprobs or 0,
            **self._engine_fields(limit),
        )


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"messages[{index}] has no role")
    if isinstance(message.get("tool_calls"), list):
        message = message | {"tool_calls": [_with_arguments(call) for call in message["tool_calls"]]}
    content = message.get("content")
    if content is None:
        return message | {"content": ""}
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
    """A tool call with its arguments as an object, as templates take them; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call

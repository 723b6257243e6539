"""Bodies of /v1/completions and /v1/chat/completions, and what they ask of the engine.

Responses are in `format`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.known_fields import HARMLESS_OPENAI_FIELDS, UNSUPPORTED_GENERATE_FIELDS
from rollout.core.sampling_params import SamplingLogprobsMode
from rollout.http.chat_messages import plain_messages, template_variables
from rollout.http.generation import (
    AnyGeneration,
    Count,
    RecordFields,
    SamplingFields,
    StreamOptions,
    check_resumable,
)
from rollout.http.protocol import FreeForm, FreeObject, Messages, TokenIds, Tools
from rollout.tokenizer_manager.request import FILL_CONTEXT, GenerateReqInput


class OpenAIRequest(SamplingFields, RecordFields, AnyGeneration):
    """The fields that both endpoints share.  `priority` is refused: lower ones go first in vLLM, and last in SGLang."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_GENERATE_FIELDS | {
        *("priority", "kv_transfer_params", "return_prompt_text", "replay_routed_experts"),
        *("return_input_ids_in_sglext", "return_output_ids_in_sglext"),
    }

    harmless: ClassVar[frozenset[str]] = HARMLESS_OPENAI_FIELDS
    default_new_tokens: ClassVar[int]

    model: str | None = None
    response_format: FreeObject | None = None
    user: str | None = None
    stream_options: StreamOptions = StreamOptions()
    rid: str | None = None
    request_id: str | None = None  # vLLM's name for it
    return_meta_info: bool = False
    sampling_logprobs_mode: SamplingLogprobsMode | None = None
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prior_output_tokens: Count = 0
    resumable: bool = False

    @property
    def name(self) -> str | None:
        """The id that the client chose for the request."""
        return self.rid or self.request_id

    @property
    def wants_prompt_token_ids(self) -> bool:
        return self.return_prompt_token_ids or self.return_token_ids

    @property
    def has_record(self) -> bool:
        """True where each choice carries what a trainer needs of its tokens: in `meta_info`, or as a token record."""
        return self.return_meta_info or self.return_token_record

    def _engine_fields(
        self, headers: Mapping[str, str], max_new_tokens: int | None, num_top: int | None
    ) -> dict[str, Any]:
        """Return the fields of `GenerateReqInput` that do not depend on the endpoint.

        `num_top` is as in `engine_logprobs`.  Raises `BadRequest`, `UnsupportedFeature`.
        """
        if self.return_sampling_mask and not self.has_record:
            raise BadRequest("return_sampling_mask requires return_meta_info=true or return_token_record=true")
        if self.resumable:
            check_resumable(self.name, stream=self.stream)
        logprobs = self.engine_logprobs(0 if num_top is None and self.has_record else num_top, stream=self.stream)
        return (
            self.common_fields(headers)
            | logprobs
            | {
                "sampling_params": self.engine_sampling(max_new_tokens),
                "rid": self.name,
                "model": self.model,
                "return_text_in_logprobs": num_top is not None and not self.return_tokens_as_token_ids,
                "return_routed_experts": self.return_routed_experts,
                "routed_experts_start_len": self.routed_experts_start_len,
                "routed_experts_format": self.routed_experts_format,
                "return_sampling_mask": self.return_sampling_mask if self.has_record else False,
                "sampling_logprobs_mode": self.sampling_logprobs_mode,
                "return_prompt_token_ids": self.wants_prompt_token_ids or self.return_token_record,
                "default_new_tokens": self.default_new_tokens,
                "prior_output_tokens": self.prior_output_tokens,
                "is_reformed": True,
            }
        )


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions.  `user` has no effect."""

    unsupported = OpenAIRequest.unsupported | {"suffix"}
    default_new_tokens = 16

    prompt: Annotated[str | list[str] | TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
    max_tokens: int | None = None
    logprobs: Count | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    def to_request(self, headers: Mapping[str, str]) -> GenerateReqInput:
        """Return the request.  Raises `BadRequest`."""
        if self.best_of is not None and self.best_of != self.n:
            raise BadRequest(f"best_of must equal n ({self.n}): candidates are not ranked, got {self.best_of}")
        prompt = self.prompt
        if isinstance(prompt, list) and not prompt:
            raise BadRequest("prompt is an empty list")
        is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
        if is_text and not self.add_special_tokens:
            raise UnsupportedFeature(
                "add_special_tokens: false is not supported for text; send the token ids that /tokenize gives with it"
            )
        fields = self._engine_fields(headers, self.max_tokens, self.logprobs)
        if self.logprobs is not None and self.echo:
            fields["logprob_start_len"] = 0
        return GenerateReqInput(
            text=prompt if is_text else None,  # type: ignore[arg-type]
            input_ids=None if is_text else prompt,  # type: ignore[arg-type]
            **fields,
        )


class ChatCompletionRequest(OpenAIRequest):
    """POST /v1/chat/completions.  `input_ids` replaces the rendered messages as the prompt."""

    default_new_tokens = FILL_CONTEXT

    unsupported = OpenAIRequest.unsupported | {
        *("echo", "chat_template", "add_special_tokens", "documents", "thinking", "task", "reasoning")
    }

    messages: Messages = []
    input_ids: TokenIds | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: Tools | None = None
    tool_choice: Annotated[Any, FreeForm] = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True
    chat_template_kwargs: FreeObject = {}
    reasoning_effort: str | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    _strict: frozenset[str] = PrivateAttr(default=frozenset())

    def set_strict(self, tools: Iterable[dict[str, Any]]) -> None:
        """Note which tools of another dialect, with names of their own, are strict."""
        self._strict = frozenset(str(tool.get("name")) for tool in tools if tool.get("strict") is True)

    def strict_names(self) -> frozenset[str]:
        """Return the names of the tools whose arguments must follow their schema."""
        functions = [tool.get("function") for tool in self.tools or ()]
        named = [each.get("name") for each in functions if isinstance(each, dict) and each.get("strict") is True]
        return self._strict.union(name for name in named if isinstance(name, str))

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the template shows to the model, and whose calls are looked for in its answer."""
        return None if self.tool_choice == "none" else self.tools

    def template_variables(self) -> dict[str, Any]:
        """Return the template's other variables.  A reasoning effort also decides whether the model thinks.

        Raises `UnsupportedFeature`.
        """
        effort: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        return effort | template_variables(self.chat_template_kwargs)

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages with content parts joined to plain text.  Raises `BadRequest`."""
        return plain_messages(self.messages)

    def begun_answer(self) -> str:
        """Return the beginning of the answer that the prompt holds, empty if it holds none."""
        return (
            str(self.template_messages()[-1]["content"] or "") if self.continue_final_message and self.messages else ""
        )

    def to_request(
        self, headers: Mapping[str, str], prompt_ids: list[int], kept_tokens: tuple[str, ...], end_ids: Sequence[int]
    ) -> GenerateReqInput:
        """Return the request for the prompt of the given ids, whose text holds `kept_tokens` and ends at `end_ids`.

        Raises `BadRequest`.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        fields = self._engine_fields(headers, limit, num_top)
        if end_ids and not self.ignore_eos:
            fields["sampling_params"]["stop_token_ids"] = [*(self.stop_token_ids or ()), *end_ids]
        return GenerateReqInput(input_ids=prompt_ids, kept_special_tokens=kept_tokens, **fields)

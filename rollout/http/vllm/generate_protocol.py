"""Body of vLLM's token endpoint, and what it asks of the engine.

Replies are in `vllm_generate_format`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollout.core.known_fields import UNSUPPORTED_GENERATE_FIELDS
from rollout.core.messages.message import Int64
from rollout.http.openai.protocol import Count, SamplingFields, StreamOptions
from rollout.http.protocol import AnyGeneration, FreeObject, TokenIds
from rollout.tokenizer_manager.request import FILL_CONTEXT, MAX_RID_CHARS, GenerateReqInput, RoutesFormat
from rollout.tokenizer_manager.validation import ServingLimits


class TokenSamplingParams(SamplingFields):
    """`sampling_params` of vLLM.  `detokenize`, `output_kind` and `flat_logprobs` change nothing here."""

    max_tokens: Count | None = None
    logprobs: Count | None = None
    routed_experts_prompt_start: int = 0


class TokenGenerateRequest(AnyGeneration):
    """POST /inference/v1/generate and /skyrl/v1/generate."""

    unsupported = UNSUPPORTED_GENERATE_FIELDS | {"replay_routed_experts"}
    other_names = {
        "rid": "request_id",
        "return_logprob": "sampling_params.logprobs",
        "return_routed_experts": "--enable-return-routed-experts at the server's start",
    }

    token_ids: TokenIds
    sampling_params: TokenSamplingParams = TokenSamplingParams()
    request_id: Annotated[str | None, Field(min_length=1, max_length=MAX_RID_CHARS)] = None
    model: str | None = None
    stream_options: StreamOptions = StreamOptions()
    priority: Int64 = 0
    kv_transfer_params: FreeObject | None = None
    return_token_ids: bool = False
    return_sampling_mask: bool | None = None
    output_mode: Literal["tokens"] = "tokens"

    def to_request(
        self, rid: str, limits: ServingLimits, *, return_routed_experts: bool, routed_experts_format: RoutesFormat
    ) -> GenerateReqInput:
        """Return the request; as in vLLM, a sample of more than the context holds ends at the context's end.

        Raises `UnsupportedFeature`.
        """
        params = self.sampling_params
        length = params.max_tokens
        sampling = params.engine_sampling(length)
        if length is not None and length > (room := limits.room(len(self.token_ids))):
            if (least := params.min_tokens) is not None and least <= length:
                sampling["min_new_tokens"] = min(least, room)
            sampling["max_new_tokens"] = room
        return GenerateReqInput(
            input_ids=self.token_ids,
            rid=rid,
            sampling_params=sampling,
            priority=self.priority,
            return_routed_experts=return_routed_experts,
            routed_experts_start_len=params.routed_experts_prompt_start,
            routed_experts_format=routed_experts_format,
            return_sampling_mask=self.return_sampling_mask,
            default_new_tokens=FILL_CONTEXT,
            is_reformed=True,
            **self.common_fields(),
            **params.engine_logprobs(params.logprobs, stream=self.stream),
        )

"""vLLM's token endpoint, token ids in and out, and SkyRL's form of it: body, routes, replies."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from rollout.core.known_fields import FIELDS_OF_SAMPLING_PARAMS, UNSUPPORTED_GENERATE_FIELDS
from rollout.core.messages.message import Int64
from rollout.http.answers import (
    Entry,
    Native,
    beside,
    finish_fields,
    finite,
    ignored_fields,
    prompt_logprobs,
    usage,
    version_info,
)
from rollout.http.direct import DirectRoute
from rollout.http.generation import AnyGeneration, Count, SamplingFields, StreamOptions, check_resumable
from rollout.http.io import SseResponse, body_schema, json_body, until_disconnect
from rollout.http.native.resumable import ResumableStreams
from rollout.http.protocol import FreeObject, TokenIds
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import FILL_CONTEXT, MAX_RID_CHARS, GenerateReqInput, RoutesFormat
from rollout.tokenizer_manager.response import encode_json
from rollout.tokenizer_manager.validation import ServingLimits


class TokenSamplingParams(SamplingFields):
    """`sampling_params` of vLLM.  `detokenize`, `output_kind` and `flat_logprobs` change nothing here."""

    max_tokens: Count | None = None
    logprobs: Count | None = None
    routed_experts_prompt_start: int = 0


class TokenGenerateRequest(AnyGeneration):
    """POST /inference/v1/generate and /skyrl/v1/generate."""

    unsupported = UNSUPPORTED_GENERATE_FIELDS | {"replay_routed_experts"}
    other_names = FIELDS_OF_SAMPLING_PARAMS | {
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
    prior_output_tokens: Count = 0
    resumable: bool = False
    output_mode: Literal["tokens"] = "tokens"

    def to_request(
        self,
        headers: Mapping[str, str],
        rid: str,
        limits: ServingLimits,
        *,
        return_routed_experts: bool,
        routed_experts_format: RoutesFormat,
    ) -> GenerateReqInput:
        """Return the request; as in vLLM, a sample of more than the context holds ends at the context's end.

        Raises `BadRequest` or `UnsupportedFeature`.
        """
        if self.resumable:
            check_resumable(self.request_id, stream=self.stream)
        params = self.sampling_params
        length = params.max_tokens
        sampling = params.engine_sampling(length)
        room = limits.room(len(self.token_ids)) + self.prior_output_tokens
        if length is not None and length > room:
            if (least := params.min_tokens) is not None and least <= length:
                sampling["min_new_tokens"] = min(least, room)
            sampling["max_new_tokens"] = room
        return GenerateReqInput(
            input_ids=self.token_ids,
            rid=rid,
            model=self.model,
            sampling_params=sampling,
            priority=self.priority,
            return_routed_experts=return_routed_experts,
            routed_experts_start_len=params.routed_experts_prompt_start,
            routed_experts_format=routed_experts_format,
            return_sampling_mask=self.return_sampling_mask,
            default_new_tokens=FILL_CONTEXT,
            prior_output_tokens=self.prior_output_tokens,
            is_reformed=True,
            **params.engine_logprobs(params.logprobs, stream=self.stream),
            **self.common_fields(headers),
        )


TokenGenerateBody = Annotated[TokenGenerateRequest, Depends(json_body(TokenGenerateRequest))]


class VllmGenerateRoutes:
    """Two paths that differ only in the form of routed experts, and in whether these must be there."""

    def __init__(self, manager: TokenizerManager, streams: ResumableStreams) -> None:
        self._manager = manager
        self._streams = streams

    def router(self) -> APIRouter:
        router = APIRouter(route_class=DirectRoute, tags=["tokens"])
        schema = body_schema(TokenGenerateRequest)
        router.add_api_route("/inference/v1/generate", self.generate, methods=["POST"], openapi_extra=schema)
        router.add_api_route("/skyrl/v1/generate", self.skyrl_generate, methods=["POST"], openapi_extra=schema)
        return router

    async def generate(self, request: Request, body: TokenGenerateBody) -> Response:
        """Generate, with routed experts wherever the server records them."""
        captures = self._manager.limits.captures_routes
        return await self._answer(request, body, captures, self._manager.server_args.vllm_routed_experts)

    async def skyrl_generate(self, request: Request, body: TokenGenerateBody) -> Response:
        """Generate with routed experts in SkyRL's form."""
        return await self._answer(request, body, True, "packed")

    async def _answer(
        self, request: Request, body: TokenGenerateRequest, wants_routes: bool, routes_format: RoutesFormat
    ) -> Response:
        rid = body.request_id or uuid.uuid4().hex
        head = {
            "request_id": rid,
            "created": int(time.time()),
            "model": body.model or self._manager.server_args.name,
        }
        wanted = body.to_request(
            request.headers,
            rid,
            self._manager.limits,
            return_routed_experts=wants_routes,
            routed_experts_format=routes_format,
        )
        handle = await until_disconnect(request.scope, request.receive, self._manager.submit(wanted))
        if body.stream:
            events = _events(handle, body, head)
            if body.resumable:
                return self._streams.begin_events(rid, handle, events)
            return SseResponse(events, on_close=handle.abort)
        natives = await until_disconnect(request.scope, request.receive, handle.results())

        def content() -> dict[str, Any]:
            choices = [choice(body, index, native) for index, native in enumerate(natives)]
            return head | {"choices": choices} | tail(body, natives) | prompt_fields(body)

        return Response(await handle.encode(content), media_type="application/json")


async def _events(
    handle: GenerateHandle, body: TokenGenerateRequest, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield the new part of every choice as it comes, then the usage."""
    num_sent: dict[int, int] = {}
    finals: dict[int, Native] = {}

    def chunk(index: int, native: Native, first: int, extra: dict[str, Any]) -> dict[str, Any]:
        return head | {"choices": [choice(body, index, native, first)]} | extra

    async with contextlib.aclosing(handle.stream()) as stream:
        async for index, native in stream:
            extra = {} if num_sent else prompt_fields(body)
            first = num_sent.get(index, 0)
            num_sent[index] = len(native["output_ids"])
            if native["meta_info"]["finish_reason"] is not None:
                finals[index] = native
                extra |= {"metadata": version_info(native)} | ignored_fields(native)
            yield await handle.encode(functools.partial(chunk, index, native, first, extra), index)
    if body.stream_options.include_usage:
        natives = [finals[index] for index in sorted(finals)]
        yield encode_json(head | {"choices": []} | tail(body, natives))


# --- replies -----------------------------------------------------------------------------------------------------


def choice(request: TokenGenerateRequest, index: int, native: Native, first: int = 0) -> dict[str, Any]:
    """Return a choice with its output from token `first` on.  Routes and versions are null until it has ended."""
    meta, params = native["meta_info"], request.sampling_params
    fields = {
        "index": index,
        "token_ids": native["output_ids"][first:],
        "logprobs": None if params.logprobs is None else _logprobs(meta, first, params.logprobs),
        "routed_experts": meta.get("routed_experts"),
        "sampling_mask": meta["output_token_sampling_mask"][first:] if "output_token_sampling_mask" in meta else None,
        "weight_versions": meta.get("weight_versions"),
    }
    return fields | finish_fields(native)


def tail(request: TokenGenerateRequest, natives: Sequence[Native]) -> dict[str, Any]:
    """Return the fields that follow the choices."""
    params, meta = request.sampling_params, natives[0]["meta_info"]
    fields: dict[str, Any] = {
        "usage": usage(natives, params.n),
        "metadata": version_info(natives[0]),
        "prompt_logprobs": None,
        "kv_transfer_params": request.kv_transfer_params,
    }
    if params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(meta, params.prompt_logprobs)
    return fields | ignored_fields(natives[0])


def prompt_fields(request: TokenGenerateRequest) -> dict[str, Any]:
    """Return the prompt as it was computed, where `return_token_ids` asks for it.  It never holds media."""
    return {"prompt_token_ids": request.token_ids, "mm_placeholders": {}} if request.return_token_ids else {}


def _logprobs(meta: dict[str, Any], first: int, num_top: int) -> dict[str, Any]:
    """Return one object per output token from `first` on.  Every value is a finite number."""
    entries = meta["output_token_logprobs"][first:]
    tops = beside(meta, "output_top_logprobs", first, entries, num_top)
    return {"content": [_token(entry) | {"top_logprobs": list(map(_token, top))} for entry, top in zip(entries, tops)]}


def _token(entry: Entry) -> dict[str, Any]:
    """Return the entry of a token.  Older clients read its id in `token`, newer ones in `token_id`."""
    return {"token": f"token_id:{entry[1]}", "token_id": entry[1], "logprob": finite(entry[0])}

"""/generate: its body, its route and its stream."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.known_fields import (
    FIELDS_OF_SAMPLING_PARAMS,
    UNSUPPORTED_GENERATE_FIELDS,
    UNSUPPORTED_SAMPLING_FIELDS,
    VLLM_SAMPLING_FIELDS,
)
from rollout.core.messages.message import Int64
from rollout.core.sampling_params import SamplingLogprobsMode
from rollout.http.generation import AnyGeneration, Count, common_fields, routing_headers
from rollout.http.io import NOTE_PASSED, NamingRoute, Parts, SseResponse, body_schema, json_body, until_disconnect
from rollout.http.native.resumable import ResumableStream, ResumableStreams
from rollout.http.protocol import Body, TokenIds, refuse_unsupported
from rollout.tokenizer_manager.binary_response import MEDIA_TYPE
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import (
    MAX_EXTRA_KEY_CHARS,
    GenerateReqInput,
    HiddenFormat,
    LogprobsFormat,
    RoutesFormat,
)


class GenerateRequest(AnyGeneration):
    """POST /generate.  Lists of prompts make a batch; other fields then take one value or a list."""

    unsupported = UNSUPPORTED_GENERATE_FIELDS - {"return_hidden_states"}
    other_names = FIELDS_OF_SAMPLING_PARAMS

    text: str | list[str] | None = None
    input_ids: Annotated[TokenIds | list[TokenIds] | None, Field(union_mode="left_to_right")] = None
    rid: str | list[str] | None = None
    lora_path: str | list[str | None] | None = None  # type: ignore[assignment]
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: Annotated[TokenIds | list[TokenIds | None] | None, Field(union_mode="left_to_right")] = None
    return_text_in_logprobs: bool = False
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0
    routed_experts_format: RoutesFormat = "compatible"
    replay_routed_experts: str | dict[str, Any] | list[str | dict[str, Any] | None] | None = None
    replay_routed_experts_start_len: int = 0
    return_prompt_token_ids: bool = False
    return_sampling_mask: bool | list[bool] | None = None
    sampling_logprobs_mode: SamplingLogprobsMode | None = None
    sampling_mask_format: Literal["lists", "csr"] = "lists"
    logprobs_format: LogprobsFormat = "nested"
    return_hidden_states: bool | list[bool] = False
    hidden_state_layers: list[Int64] | None = None
    hidden_states_start_len: Int64 = 0
    hidden_states_format: HiddenFormat = "nested"
    priority: Int64 = 0
    prior_output_tokens: Count | list[Count] = 0
    stream_format: Literal["cumulative", "incremental"] | None = None
    resumable: bool = False

    def to_request(self, headers: Mapping[str, str]) -> GenerateReqInput:
        """Return the request.  Raises `BadRequest` or `UnsupportedFeature`."""
        if not self.stream and (self.stream_format == "incremental" or self.resumable):
            raise BadRequest("stream_format and resumable need stream: true")
        if self.resumable and not isinstance(self.rid, str):
            raise BadRequest("a resumable stream needs a rid of its own, by which its client asks for the rest")
        return _request(self, _OWN_FIELDS, headers)


class ResumeRequest(Body):
    """POST /generate/resume.  `from_token`: the first token of every sample, or a list with one of each.

    `from_event`: the number of the first event, for a stream of another door.
    """

    rid: str
    from_token: Count | list[Count] | None = None
    from_event: Count | None = None


_OF_STREAMS = {"stream_format", "resumable"}
_OWN_FIELDS = tuple(GenerateRequest.model_fields.keys() - AnyGeneration.model_fields.keys() - _OF_STREAMS)
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_ExtraKey = Annotated[str, msgspec.Meta(max_length=MAX_EXTRA_KEY_CHARS)]


class PlainGenerate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of one prompt in a `GenerateRequest`, read in a tenth of the time.

    A body with other fields, with lists of prompts or with values that need a conversion does not fit, and is read as a
    `GenerateRequest`.
    """

    text: str | None = None
    input_ids: list[_TokenId] | None = None
    rid: str | None = None
    sampling_params: dict[str, Any] = {}
    return_logprob: bool = False
    logprob_start_len: _Int64 = -1
    top_logprobs_num: _Int64 = 0
    return_text_in_logprobs: bool = False
    return_routed_experts: bool | None = None
    routed_experts_start_len: _Int64 = 0
    routed_experts_format: RoutesFormat = "compatible"
    return_prompt_token_ids: bool = False
    logprobs_format: LogprobsFormat = "nested"
    priority: _Int64 = 0
    stream: bool = False
    session_id: str | None = None
    lora_path: str | None = None
    extra_key: _ExtraKey | None = None
    cache_salt: _ExtraKey | None = None
    max_kv_version_lag: _Int64 | None = None
    routed_dp_rank: _Int64 | None = None
    data_parallel_rank: _Int64 | None = None

    @property
    def ignored_fields(self) -> list[str]:
        return []

    def to_request(self, headers: Mapping[str, str]) -> GenerateReqInput:
        """Return the request.  Raises `BadRequest` or `UnsupportedFeature`."""
        return _request(self, _PLAIN_OWN_FIELDS, headers)


_PLAIN_OWN_FIELDS = tuple(name for name in PlainGenerate.__struct_fields__ if name in _OWN_FIELDS)


def _request(body: GenerateRequest | PlainGenerate, own: Sequence[str], headers: Mapping[str, str]) -> GenerateReqInput:
    params = body.sampling_params
    slime = [_asks_for_top_p_ids(each) for each in (params if isinstance(params, list) else [params])]
    fields = {name: getattr(body, name) for name in own} | common_fields(body, headers)
    if True in slime:
        fields |= {
            "return_sampling_mask": slime if isinstance(params, list) else True,
            "sampling_mask_format": "slime",
        }
    fields["priority"] = -body.priority  # SGLang's higher ones come first
    return GenerateReqInput(**fields)


def _asks_for_top_p_ids(params: dict[str, Any]) -> bool:
    """Return whether slime asks for sampling masks in its form.  Raises `UnsupportedFeature`."""
    if params.keys().isdisjoint(_SPECIAL_PARAMS):
        return False
    asks = params.get("custom_params") == {"return_top_p_token_ids": True}
    refused = UNSUPPORTED_SAMPLING_FIELDS - {"custom_params"} if asks else UNSUPPORTED_SAMPLING_FIELDS
    refuse_unsupported(params, refused, "sampling_params: ")
    for name, ours in VLLM_SAMPLING_FIELDS.items():
        if params.get(name) is not None and params[name] is not False:
            raise UnsupportedFeature(f"sampling_params: {name} is vLLM's; ask with {ours}")
    return asks


_WEIGHT = re.compile(r"[01](\.[0-9]{0,3})?")
_SPECIAL_PARAMS = UNSUPPORTED_SAMPLING_FIELDS | VLLM_SAMPLING_FIELDS.keys()
GenerateBody = Annotated[
    GenerateRequest | PlainGenerate, Depends(json_body(GenerateRequest, msgspec.json.Decoder(PlainGenerate)))
]
ResumeBody = Annotated[ResumeRequest, Depends(json_body(ResumeRequest))]


class GenerateRoutes:
    """SGLang's native endpoint for tokens, and the rest of a stream whose connection was lost."""

    def __init__(self, manager: TokenizerManager, streams: ResumableStreams) -> None:
        self._manager = manager
        self._streams = streams

    def router(self) -> APIRouter:
        router = APIRouter(route_class=NamingRoute, tags=["native"])
        schema = body_schema(GenerateRequest)
        for method in ("POST", "PUT"):  # one route each, so that each has an operation id of its own
            router.add_api_route("/generate", self.generate, methods=[method], openapi_extra=schema)
        resume_schema = body_schema(ResumeRequest)
        router.add_api_route("/generate/resume", self.resume, methods=["POST"], openapi_extra=resume_schema)
        return router

    async def generate(self, request: Request, body: GenerateBody) -> Response:
        """Generate, or score with `max_new_tokens` 0.  One prompt and n = 1 reply with an object, else with a list.

        `Accept: application/x-msgpack` asks for msgpack with arrays, unless JSON weighs more there.
        A stream and an error are JSON.
        """
        headers = routing_headers(request.scope["headers"])
        wanted = body.to_request(headers)
        if body.stream:
            return await until_disconnect(request.scope, request.receive, self._stream(body, wanted))
        wanted.is_binary = accepts_binary(headers.get("accept", ""))
        note_passed = request.scope.get("extensions", {}).get(NOTE_PASSED)
        parts, handle = await until_disconnect(request.scope, request.receive, self._answer(wanted, note_passed))
        held = handle if wanted.return_hidden_states else None
        return Parts(parts, is_list=handle.replies_with_list, is_binary=wanted.is_binary, held=held)

    async def resume(self, request: Request, body: ResumeBody) -> Response:
        """Answer with the stream of a resumable request from a token on, or from an event on, until its end.

        A connection that still reads the stream ends with an error: a stream has one reader.
        """
        if body.from_event is not None:
            if body.from_token is not None:
                raise BadRequest("give either from_token or from_event")
            return self._streams.resume_events(body.rid, body.from_event)
        stream, first = self._streams.resume(body.rid, 0 if body.from_token is None else body.from_token)
        return self._response(stream, first)

    async def _stream(self, body: GenerateRequest | PlainGenerate, wanted: GenerateReqInput) -> Response:
        named = None if isinstance(body, PlainGenerate) else body.stream_format
        by_default = self._manager.server_args.incremental_streaming_output
        is_incremental = by_default if named is None else named == "incremental"
        wanted.stream_rows = is_incremental
        handle = await self._manager.submit(wanted)
        first = [0] * len(handle.records)
        if isinstance(body, GenerateRequest) and body.resumable:
            assert isinstance(body.rid, str), "checked by to_request"
            stream = self._streams.begin(body.rid, handle, is_incremental=is_incremental)
            return self._response(stream, first)
        outputs = handle.tails(first) if is_incremental else handle.stream()
        return SseResponse(_events(handle, outputs), on_close=handle.abort)

    def _response(self, stream: ResumableStream, first: list[int]) -> Response:
        """Return the answer to a new reader, which begins at token `first[i]` of sample i."""
        handle = stream.handle
        outputs = handle.tails(first) if stream.is_incremental else handle.stream_from(first)

        async def events() -> AsyncGenerator[bytes, None]:
            async with contextlib.aclosing(_events(handle, outputs)) as inner:
                async for event in inner:
                    yield event
            stream.is_sent = True

        return SseResponse(events(), on_close=functools.partial(self._streams.leave, stream, stream.reader))

    async def _answer(
        self, wanted: GenerateReqInput, note_passed: Callable[[GenerateHandle], None] | None
    ) -> tuple[list[bytes], GenerateHandle]:
        """Return the content of each sample once all have ended, and their handle."""
        handle = await self._manager.submit(wanted)
        if note_passed is not None:
            note_passed(handle)
        return await handle.encoded(), handle


def accepts_binary(accept: str) -> bool:
    """Return whether the value of an `Accept` header names msgpack, and does not weigh it below JSON.

    A weight must be a number; any other counts as 0.
    """
    weights: dict[str, float] = {}
    for each in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        text = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        weights[kind] = float(text) if _WEIGHT.fullmatch(text) else 0.0
    return weights.get(MEDIA_TYPE, 0.0) > 0.0 and weights[MEDIA_TYPE] >= weights.get("application/json", 0.0)


async def _events(
    handle: GenerateHandle, outputs: AsyncGenerator[tuple[int, dict[str, Any]], None]
) -> AsyncGenerator[bytes, None]:
    """Yield responses as they grow.  In a list, each response names its sample."""
    async with contextlib.aclosing(outputs) as stream:
        async for index, response in stream:
            content = response | {"index": index} if handle.replies_with_list else response
            yield await handle.encode(functools.partial(dict, content), index)

"""vLLM's token endpoint, token ids in and out, and SkyRL's form of it.

The request is `vllm_generate_protocol`, the layout of a reply's parts `vllm_generate_format`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from rollout.http.io import SseResponse, body_schema, json_body, until_disconnect
from rollout.http.native.sessions import addressed
from rollout.http.openai.format import Native, ignored_fields, version_info
from rollout.http.vllm import generate_format as fmt
from rollout.http.vllm.generate_protocol import TokenGenerateRequest
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import RoutesFormat
from rollout.tokenizer_manager.response import encode_json

TokenGenerateBody = Annotated[TokenGenerateRequest, Depends(json_body(TokenGenerateRequest))]


class VllmGenerateRoutes:
    """Both paths do the same; they differ in the form of routed experts and in whether those must be there."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tokens"])
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
        asked = body.to_request(
            rid, self._manager.limits, return_routed_experts=wants_routes, routed_experts_format=routes_format
        )
        wanted = addressed(asked, request.headers)
        handle = await until_disconnect(request.receive, self._manager.submit(wanted))
        if body.stream:
            return SseResponse(_events(handle, body, head), on_close=handle.abort)
        natives = await until_disconnect(request.receive, handle.results())

        def content() -> dict[str, Any]:
            choices = [fmt.choice(body, index, native) for index, native in enumerate(natives)]
            return head | {"choices": choices} | fmt.tail(body, natives) | fmt.prompt_fields(body)

        return Response(await handle.encode(content), media_type="application/json")


async def _events(
    handle: GenerateHandle, body: TokenGenerateRequest, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield the new part of every choice as it comes, then the usage."""
    num_sent: dict[int, int] = {}
    finals: dict[int, Native] = {}

    def chunk(index: int, native: Native, first: int, extra: dict[str, Any]) -> dict[str, Any]:
        return head | {"choices": [fmt.choice(body, index, native, first)]} | extra

    async with contextlib.aclosing(handle.stream()) as stream:
        async for index, native in stream:
            extra = {} if num_sent else fmt.prompt_fields(body)
            first = num_sent.get(index, 0)
            num_sent[index] = len(native["output_ids"])
            if native["meta_info"]["finish_reason"] is not None:
                finals[index] = native
                extra |= {"metadata": version_info(native)} | ignored_fields(native)
            yield await handle.encode(functools.partial(chunk, index, native, first, extra), index)
    if body.stream_options.include_usage:
        natives = [finals[index] for index in sorted(finals)]
        yield encode_json(head | {"choices": []} | fmt.tail(body, natives))

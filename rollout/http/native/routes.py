"""/generate, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from rollout.core.errors import BadRequest, TooLarge
from rollout.http.io import (
    JsonParts,
    NamingRoute,
    SseResponse,
    body_schema,
    json_body,
    json_response,
    until_disconnect,
)
from rollout.http.native.sessions import addressed
from rollout.http.openai.protocol import plain_messages
from rollout.http.protocol import DetokenizeRequest, GenerateRequest, TokenizeRequest, template_variables
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import MAX_BATCH
from rollout.tokenizer_manager.validation import check_token_ids

MAX_DECODED_IDS = 1 << 20

GenerateBody = Annotated[GenerateRequest, Depends(json_body(GenerateRequest))]
TokenizeBody = Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))]


class NativeRoutes:
    """SGLang's native data endpoints."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        router = APIRouter(route_class=NamingRoute, tags=["native"])
        add = router.add_api_route
        for method in ("POST", "PUT"):  # one route each, so that each has an operation id of its own
            add("/generate", self.generate, methods=[method], openapi_extra=body_schema(GenerateRequest))
        for prefix in ("", "/v1"):
            add(f"{prefix}/tokenize", self.tokenize, methods=["POST"], openapi_extra=body_schema(TokenizeRequest))
            add(f"{prefix}/detokenize", self.detokenize, methods=["POST"], openapi_extra=body_schema(DetokenizeRequest))
        return router

    async def generate(self, request: Request, body: GenerateBody) -> Response:
        """Generate, or score with `max_new_tokens` 0.  One prompt and n = 1 reply with an object, else with a list."""
        wanted = addressed(body.to_request(), request.headers)
        handle = await until_disconnect(request.receive, self._manager.submit(wanted))
        if body.stream:
            return SseResponse(_events(handle), on_close=handle.abort)
        parts = await until_disconnect(request.receive, handle.encoded())
        return JsonParts(parts, is_list=handle.replies_with_list)

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Token ids of a prompt, a list of prompts, or a chat under the model's template."""
        tokenizer, limits = self._manager.tokenizer, self._manager.limits
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages")
        if isinstance(body.prompt, list) and len(body.prompt) > MAX_BATCH:
            raise TooLarge(f"a request holds at most {MAX_BATCH} prompts, got {len(body.prompt)}")
        if body.messages is not None:
            tokens: Any = await tokenizer.render_chat(
                plain_messages(body.messages),
                tools=body.tools,
                continue_final=body.continue_final_message,
                add_generation_prompt=body.add_generation_prompt,
                extra=template_variables(body.chat_template_kwargs),
            )
        elif isinstance(body.prompt, str):
            (tokens,) = await tokenizer.encode([body.prompt], add_special_tokens=body.add_special_tokens)
        else:
            tokens = await tokenizer.encode(body.prompt or [], add_special_tokens=body.add_special_tokens)
        count: Any = [len(ids) for ids in tokens] if isinstance(body.prompt, list) else len(tokens)
        content = {"tokens": tokens, "count": count, "max_model_len": limits.context_length}
        return await asyncio.to_thread(json_response, content)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Text of token ids, or of each list of them."""
        tokenizer, vocab_size = self._manager.tokenizer, self._manager.limits.vocab_size
        is_batch = bool(body.tokens) and isinstance(body.tokens[0], list)
        batch: list[Any] = list(body.tokens) if is_batch else [body.tokens]  # of lists of ids
        if len(batch) > MAX_BATCH:
            raise TooLarge(f"a request holds at most {MAX_BATCH} lists of token ids, got {len(batch)}")
        size = sum(map(len, batch))
        if size > MAX_DECODED_IDS:
            raise TooLarge(f"a request holds at most {MAX_DECODED_IDS} token ids to decode, got {size}")
        for token_ids in batch:
            check_token_ids(token_ids, vocab_size, "tokens")
        skips = body.skip_special_tokens
        content = {}
        for name, default in (("text", True), ("prompt", False)):  # SGLang's name and default, and vLLM's
            texts = await tokenizer.decode_each(batch, skip_special_tokens=default if skips is None else skips)
            content[name] = texts if is_batch else texts[0]
        return json_response(content)


async def _events(handle: GenerateHandle) -> AsyncGenerator[bytes, None]:
    """Yield cumulative responses as they grow; the responses of a list say which sample they are."""
    async with contextlib.aclosing(handle.stream()) as stream:
        async for index, response in stream:
            content = response | {"index": index} if handle.replies_with_list else response
            yield await handle.encode(functools.partial(dict, content), index)

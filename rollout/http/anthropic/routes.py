"""/v1/messages and /v1/messages/count_tokens, with Anthropic's form of errors."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from rollout.core.errors import LockstepError, status_of
from rollout.http.answers import Native
from rollout.http.anthropic.blocks import MessageBlocks, ending, extras, message_head, usage, whole_message
from rollout.http.anthropic.protocol import CountTokensRequest, MessagesRequest
from rollout.http.direct import DirectRoute, Handler
from rollout.http.io import (
    SseForm,
    SseResponse,
    body_schema,
    error_content,
    json_body,
    json_response,
    named_event,
    until_disconnect,
)
from rollout.http.openai.chats import Chats
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.manager import TokenizerManager

MessagesBody = Annotated[MessagesRequest, Depends(json_body(MessagesRequest))]
CountTokensBody = Annotated[CountTokensRequest, Depends(json_body(CountTokensRequest))]
_KINDS = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def _error(error: Exception) -> dict[str, Any]:
    """Return an error in Anthropic's form: its kinds are coarser than ours."""
    kind = _KINDS.get(status_of(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": error_content(error)["message"]}}


_EVENTS = SseForm(b"", b"", lambda error: named_event(_error(error)), b"")


class _MessagesRoute(DirectRoute):
    """A route whose errors have Anthropic's form."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handler(request)
            except LockstepError as error:
                return json_response(_error(error), status_of(error))

        return handled


class AnthropicRoutes:
    """Anthropic's endpoints over chats."""

    def __init__(self, manager: TokenizerManager, chats: Chats) -> None:
        self._manager = manager
        self._chats = chats

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/messages", route_class=_MessagesRoute, tags=["agents"])
        add = router.add_api_route
        add("", self.messages, methods=["POST"], openapi_extra=body_schema(MessagesRequest))
        add("/count_tokens", self.count_tokens, methods=["POST"], openapi_extra=body_schema(CountTokensRequest))
        return router

    async def messages(self, request: Request, body: MessagesBody) -> Response:
        """Answer a conversation with one message."""
        chat = body.chat()
        chat.rid = chat.rid or f"msg_{uuid.uuid4().hex}"
        submitted = self._chats.submit(chat, request.headers, ends_with_context=True)
        handle, (message,) = await until_disconnect(request.scope, request.receive, submitted)
        blocks = MessageBlocks(message)
        model = chat.model or self._manager.server_args.name
        if chat.stream:
            return SseResponse(_events(chat, handle, blocks, model), on_close=handle.abort, form=_EVENTS)
        (native,) = await until_disconnect(request.scope, request.receive, handle.results())
        content = await handle.encode(lambda: whole_message(chat, blocks, model, native))
        return Response(content, media_type="application/json")

    async def count_tokens(self, request: Request, body: CountTokensBody) -> Response:
        """Count the tokens of a conversation's prompt."""
        prompt_ids = await self._chats.prompt_ids(body.chat())
        return json_response({"input_tokens": len(prompt_ids)})


async def _events(
    chat: ChatCompletionRequest, handle: GenerateHandle, blocks: MessageBlocks, model: str
) -> AsyncGenerator[bytes, None]:
    """Yield the message's head, its blocks as they come, and its end with the token record."""
    record = handle.records[0]
    begun = {"input_tokens": len(record.prompt_ids), "output_tokens": 0}
    yield named_event({"type": "message_start", "message": message_head(record.rid, model) | {"usage": begun}})
    native: Native = {}
    async with contextlib.aclosing(handle.stream()) as stream:
        async for _, native in stream:
            for event in blocks.events(native):
                yield named_event(event)
    last = {"type": "message_delta", "delta": ending(chat, blocks, native), "usage": usage(native)} | extras(
        chat, native
    )
    yield named_event(last)
    yield named_event({"type": "message_stop"})

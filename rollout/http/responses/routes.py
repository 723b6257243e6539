"""/v1/responses: create, get and delete."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from rollout.core.errors import status_of
from rollout.http.answers import Native
from rollout.http.direct import DirectRoute
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
from rollout.http.native.event_log import TakenOver
from rollout.http.native.resumable import ResumableStreams
from rollout.http.openai.chats import Chats
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.http.responses.items import Message
from rollout.http.responses.output import OutputItems, begun, ended, seals_thoughts
from rollout.http.responses.protocol import ResponsesRequest
from rollout.http.responses.store import ResponseStore, StoredResponse
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.response import encode_json

ResponsesBody = Annotated[ResponsesRequest, Depends(json_body(ResponsesRequest))]


class _NumberedEvents:
    """The events of one stream, which are numbered from 0.  An error is the last one of its reader."""

    def __init__(self) -> None:
        self._number = 0
        self.form = SseForm(b"", b"", self._error, b"")

    def event(self, content: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(content | {"sequence_number": number})

    def _error(self, error: Exception) -> bytes:
        message = error_content(error)["message"]
        content = {"type": "error", "code": str(status_of(error)), "message": message, "param": None}
        # A client goes on behind the last number that it saw: one that lost the stream has not seen what came since.
        number = error.last if isinstance(error, TakenOver) else self._number
        return named_event(content | {"sequence_number": number})


@dataclass(frozen=True, slots=True)
class _Answering:
    """A response in the making."""

    body: ResponsesRequest
    chat: ChatCompletionRequest
    messages: list[Message]  # the conversation before the answer
    handle: GenerateHandle
    items: OutputItems
    head: dict[str, Any]


class ResponsesRoutes:
    """OpenAI's Responses over chats."""

    def __init__(self, manager: TokenizerManager, chats: Chats, streams: ResumableStreams) -> None:
        self._manager = manager
        self._chats = chats
        self._streams = streams
        self._store = ResponseStore()

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/responses", route_class=DirectRoute, tags=["agents"])
        add = router.add_api_route
        add("", self.create, methods=["POST"], openapi_extra=body_schema(ResponsesRequest))
        add("/{response_id}", self.get, methods=["GET"])
        add("/{response_id}", self.delete, methods=["DELETE"])
        return router

    async def create(self, request: Request, body: ResponsesBody) -> Response:
        """Answer the items of a conversation, or go on from an earlier response."""
        previous = body.previous_response_id
        messages = body.messages([] if previous is None else self._store.get(previous).messages)
        chat = body.chat(messages)
        chat.rid = chat.rid or f"resp_{uuid.uuid4().hex}"
        submitted = self._chats.submit(chat, request.headers)
        handle, (message,) = await until_disconnect(request.scope, request.receive, submitted)
        head = begun(body, chat, chat.rid, chat.model or self._manager.server_args.name, int(time.time()))
        items = OutputItems(message, seals=seals_thoughts(body))
        answering = _Answering(body, chat, messages, handle, items, head)
        if chat.stream:
            numbered = _NumberedEvents()
            events, form = self._events(answering, numbered.event), numbered.form
            if body.background:
                return self._streams.begin_events(chat.rid, handle, events, form, shows_numbers=False)
            return SseResponse(events, on_close=handle.abort, form=form)
        (native,) = await until_disconnect(request.scope, request.receive, handle.results())
        for _ in items.events(native):
            pass
        content = await self._whole(answering, native)
        encoded = await handle.encode(lambda: content)
        return Response(await self._kept(answering, encoded), media_type="application/json")

    async def get(
        self, response_id: str, stream: bool = False, starting_after: Annotated[int, Query(ge=-1, lt=1 << 62)] = -1
    ) -> Response:
        """Return a response that is kept, or the events of a background one after the event `starting_after`."""
        if stream:
            return self._streams.resume_events(response_id, starting_after + 1)
        return Response(self._store.get(response_id).content, media_type="application/json")

    async def delete(self, response_id: str) -> Response:
        """Forget a response, and its events."""
        self._store.delete(response_id)
        self._streams.forget_ended(response_id)  # a request that runs has the name of an earlier one
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    async def _whole(self, answering: _Answering, native: Native) -> dict[str, Any]:
        thoughts, num_thought = answering.items.thoughts, 0
        if thoughts:  # there are none without a tokenizer
            (ids,) = await self._manager.tokenizer.encode([thoughts], add_special_tokens=False)
            num_thought = len(ids)
        return ended(answering.head, answering.chat, answering.items, native, num_thought)

    async def _kept(self, answering: _Answering, content: bytes) -> bytes:
        """Keep a finished response if its request wants that; return its JSON."""
        if answering.body.store:
            messages = [*answering.messages, answering.items.message()]
            num_bytes = len(content) + len(await asyncio.to_thread(encode_json, messages))
            self._store.put(answering.head["id"], StoredResponse(messages, content, num_bytes))
        return content

    async def _events(
        self, answering: _Answering, event: Callable[[dict[str, Any]], bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a response, each through `event`."""
        yield event({"type": "response.created", "response": answering.head})
        yield event({"type": "response.in_progress", "response": answering.head})
        native: Native = {}
        async with contextlib.aclosing(answering.handle.stream()) as stream:
            async for _, native in stream:
                for content in answering.items.events(native):
                    yield event(content)
        response = await self._whole(answering, native)
        await self._kept(answering, await answering.handle.encode(lambda: response))
        yield event({"type": f"response.{response['status']}", "response": response})

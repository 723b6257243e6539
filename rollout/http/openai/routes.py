"""/v1/completions, /v1/chat/completions and /v1/models.

The request is in `protocol`, the layout of a response's parts in `format`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from rollout.core.errors import NotFound, TooLarge
from rollout.http.answers import Native, ignored_fields
from rollout.http.direct import DirectRoute
from rollout.http.io import SseResponse, body_schema, json_body, json_response, until_disconnect
from rollout.http.native.resumable import ResumableStreams
from rollout.http.openai import format as fmt
from rollout.http.openai.chats import Chats
from rollout.http.openai.protocol import ChatCompletionRequest, CompletionRequest, OpenAIRequest
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.response import encode_json

CompletionBody = Annotated[CompletionRequest, Depends(json_body(CompletionRequest))]
ChatBody = Annotated[ChatCompletionRequest, Depends(json_body(ChatCompletionRequest))]

ChoiceOf = Callable[[fmt.ChoiceCursor, int, Native], dict[str, Any]]


class OpenAIRoutes:
    """OpenAI's endpoints with SGLang's additions for RL."""

    def __init__(self, manager: TokenizerManager, chats: Chats, streams: ResumableStreams) -> None:
        self._manager = manager
        self._chats = chats
        self._streams = streams

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", route_class=DirectRoute, tags=["openai"])
        add = router.add_api_route
        add("/completions", self.completions, methods=["POST"], openapi_extra=body_schema(CompletionRequest))
        add("/chat/completions", self.chat, methods=["POST"], openapi_extra=body_schema(ChatCompletionRequest))
        add("/models", self.models)
        add("/models/{model:path}", self.model)
        return router

    # --- completions ---------------------------------------------------------------------------------------------

    async def completions(self, request: Request, body: CompletionBody) -> Response:
        """Complete one prompt or several, as text or token ids."""
        wanted = body.to_request(request.headers)
        handle = await until_disconnect(request.scope, request.receive, self._manager.submit(wanted))
        prompt_texts = await self._prompt_texts(body, handle)

        def choice_of(cursor: fmt.ChoiceCursor, index: int, native: Native) -> dict[str, Any]:
            return cursor.completion(body, index, native, prompt_texts[index])

        return await self._answer(request, handle, body, "text_completion", choice_of)

    async def _prompt_texts(self, body: CompletionRequest, handle: GenerateHandle) -> list[str]:
        """Return the text to put before each choice.  Raises `TooLarge` where all of them together are too long."""
        if not body.echo:
            return [""] * len(handle.records)
        if isinstance(body.prompt, str):
            texts = [body.prompt] * len(handle.records)
        else:
            # The samples of a prompt share its ids.
            prompts = {id(record.prompt_ids): record.prompt_ids for record in handle.records}
            decoded = await self._manager.tokenizer.decode_each([*prompts.values()], skip_special_tokens=False)
            text_of = dict(zip(prompts, decoded, strict=True))
            texts = [text_of[id(record.prompt_ids)] for record in handle.records]
        try:
            self._manager.limits.budget.require_text(sum(map(len, texts)), "echoed prompts")
        except TooLarge:
            handle.abort()
            raise
        return texts

    # --- chat ----------------------------------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatBody) -> Response:
        """Answer a chat under the model's template, or continue `input_ids`."""
        chat = self._chats.submit(body, request.headers)
        handle, messages = await until_disconnect(request.scope, request.receive, chat)

        def choice_of(cursor: fmt.ChoiceCursor, index: int, native: Native) -> dict[str, Any]:
            return cursor.chat(body, messages[index], index, native)

        return await self._answer(request, handle, body, "chat.completion", choice_of)

    # --- replies -------------------------------------------------------------------------------------------------

    def _cursor(self, body: OpenAIRequest) -> fmt.ChoiceCursor:
        return fmt.ChoiceCursor(body, self._manager.vocabulary)

    def _model_name(self, body: OpenAIRequest) -> str:
        return body.model or self._manager.server_args.name

    async def _answer(
        self, request: Request, handle: GenerateHandle, body: OpenAIRequest, object_name: str, choice_of: ChoiceOf
    ) -> Response:
        """Return the whole response, or its stream."""
        if body.stream:
            events = self._events(handle, body, object_name, choice_of)
            if body.resumable and body.name is not None:
                return self._streams.begin_events(body.name, handle, events)
            return SseResponse(events, on_close=handle.abort)
        natives = await until_disconnect(request.scope, request.receive, handle.results())
        head = fmt.response_head(object_name, self._model_name(body), int(time.time()), natives[0])

        def content() -> dict[str, Any]:
            choices = [choice_of(self._cursor(body), index, native) for index, native in enumerate(natives)]
            return head | {"choices": choices} | fmt.response_tail(body, natives)

        return Response(await handle.encode(content), media_type="application/json")

    async def _events(
        self, handle: GenerateHandle, body: OpenAIRequest, object_name: str, choice_of: ChoiceOf
    ) -> AsyncGenerator[bytes, None]:
        """Yield chunks of every choice as they come, then the routes of the first choice, then the usage."""
        created, is_chat = int(time.time()), isinstance(body, ChatCompletionRequest)
        object_name += ".chunk" if is_chat else ""
        cursors: defaultdict[int, fmt.ChoiceCursor] = defaultdict(functools.partial(self._cursor, body))
        finals: dict[int, Native] = {}
        head = fmt.response_head(object_name, self._model_name(body), created, _first_native(handle))
        async with contextlib.aclosing(handle.stream()) as stream:
            async for index, native in stream:
                if is_chat and index not in cursors:
                    has_ids = body.return_token_ids and not cursors
                    opening = {"prompt_token_ids": native["prompt_token_ids"]} if has_ids else {}
                    yield encode_json(head | {"choices": [_role_choice(index)]} | opening)
                make_choice = functools.partial(choice_of, cursors[index], index, native)
                if native["meta_info"]["finish_reason"] is None:
                    yield encode_json(_chunk(head, make_choice))
                else:
                    finals[index] = native
                    last = head | fmt.versions(native) | ignored_fields(native)
                    yield await handle.encode(functools.partial(_chunk, last, make_choice), index)
        natives = [finals[index] for index in sorted(finals)]
        tail = fmt.response_tail(body, natives)
        closing = head | {"choices": []} | fmt.versions(natives[0])
        if "sglext" in tail:
            yield encode_json(closing | {"sglext": tail["sglext"]})
        if body.stream_options.include_usage:
            yield encode_json(closing | {"usage": tail["usage"]})

    # --- models --------------------------------------------------------------------------------------------------

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_card(name) for name in self._names]})

    async def model(self, model: str) -> Response:
        if model not in self._names:
            raise NotFound(f"the model {model!r} does not exist")
        return json_response(self._model_card(model))

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._manager.server_args.names, *(self._manager.limits.names.adapters or ()))

    def _model_card(self, name: str) -> dict[str, Any]:
        args, adapters = self._manager.server_args, self._manager.limits.names.adapters or {}
        return {
            "id": name,
            "object": "model",
            "created": int(self._manager.started_at),
            "owned_by": "lockstep",
            "root": adapters[name].source if name in adapters else args.model_path,
            "parent": args.name if name in adapters else None,
            "max_model_len": self._manager.limits.context_length,
        }


def _chunk(head: dict[str, Any], make_choice: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return head | {"choices": [make_choice()]}


def _first_native(handle: GenerateHandle) -> Native:
    """Return as much of the first choice as the head of a chunk needs."""
    return {"meta_info": {"id": handle.records[0].rid}}


def _role_choice(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

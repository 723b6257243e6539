"""Reading of bodies, writing of errors, naming of unknown fields and noticing of disconnects.

Every route file shares these parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout.core.errors import BadRequest, LockstepError, TooLarge, status_of
from rollout.core.known_fields import shown, unknown_field
from rollout.http.decoding import HEAVY_BODY_BYTES, INVALID, decode
from rollout.http.direct import DirectRoute, Handler
from rollout.http.known_lists import KnownLists
from rollout.http.protocol import Body, UnknownField, body_in, unknown_fields
from rollout.tokenizer_manager.binary_response import MEDIA_TYPE, list_head
from rollout.tokenizer_manager.response import encode_json

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
THREAD_BODY_BYTES = 64 * 1024
"""Bodies over this size are parsed off the event loop."""
MAX_MESSAGE_CHARS = 4096
CLIENT_CLOSED_REQUEST = 499
WATCH_DISCONNECT = "lockstep.watch_disconnect"
"""The extension of a scope that holds a `WatchDisconnect`."""
NOTE_PASSED = "lockstep.note_passed"
"""The extension of a scope that holds what takes the handle of a generation request that passed all checks, or None."""
WatchDisconnect = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what is to be called when the client goes away, and returns what ends the watch."""
IGNORED_HEADER = "x-ignored-fields"
"""The header of an answer that has no place for the unknown fields; a list in JSON."""

Model = TypeVar("Model", bound=Body)
Plain = TypeVar("Plain", bound=msgspec.Struct)
Result = TypeVar("Result")


def json_response(content: Any, status_code: int = 200) -> Response:
    return Response(encode_json(content), status_code, media_type="application/json")


class Parts(Response):
    """An answer whose content is in parts: a list of them, or a single one.  Each part is given up as it is sent.

    The parts are JSON, or msgpack where `is_binary`.  `held` lives until the client has read nearly all of them.
    """

    def __init__(
        self, parts: list[bytes], *, is_list: bool, is_binary: bool = False, held: object | None = None
    ) -> None:
        if is_binary:
            pieces = [list_head(len(parts)), *parts] if is_list else parts
        else:
            pieces = [piece for part in parts for piece in (b",", part)][1:]
            pieces = [b"[", *pieces, b"]"] if is_list else pieces
        self._pieces, self._held = pieces, held
        self.media_type = MEDIA_TYPE if is_binary else "application/json"
        super().__init__()
        self.headers["content-length"] = str(sum(map(len, self._pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()
        while self._pieces:
            piece, is_held = self._pieces.pop(), self._held is not None
            await send({"type": "http.response.body", "body": piece, "more_body": is_held or bool(self._pieces)})
        if self._held is not None:  # the server sends this once the parts before have left its buffer
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            self._held = None


def error_content(error: BaseException) -> dict[str, str]:
    """Return the `type` and `message` of an error.  Details of internal errors are logged, not returned.

    A message may repeat what a client sent: it is cut at `MAX_MESSAGE_CHARS`.
    """
    if isinstance(error, HTTPException):
        return {"type": "HTTPError", "message": str(error.detail)[:MAX_MESSAGE_CHARS]}
    if isinstance(error, LockstepError) or hasattr(error, "status_code"):
        return {"type": getattr(error, "kind", type(error).__name__), "message": str(error)[:MAX_MESSAGE_CHARS]}
    return {"type": "InternalError", "message": f"internal error: {type(error).__name__}"}


def error_response(error: BaseException) -> Response:
    return json_response({"error": error_content(error)}, status_of(error))


# --- bodies ------------------------------------------------------------------------------------------------------


def json_body(
    model: type[Model], plain: msgspec.json.Decoder[Plain] | None = None
) -> Callable[[Request], Awaitable[Model | Plain]]:
    """Return a FastAPI dependency that reads a body as `model`, whatever its content type.  No body counts as `{}`.

    A short body that fits `plain` is read by that: it means the same, and is read faster.  The dependency raises
    `BadRequest`, `UnsupportedFeature`, or `TooLarge` over 64 MiB or `MAX_BODY_OBJECTS`.
    """

    async def read(request: Request) -> Model | Plain:
        data = await read_limited(request)
        if plain is not None and len(data) <= THREAD_BODY_BYTES:
            with contextlib.suppress(*INVALID):
                return plain.decode(data)
        known = request.app.state.known_lists
        return accepted(request, await parsed(request, data, lambda data: parse_body(model, data, known)))

    return read


def accepted(request: Request, body: Model) -> Model:
    """Return `body`, and have the answer name its unknown fields.  Raises `BadRequest` under --strict-requests."""
    note_unknown(request, body.unknown)
    return body


async def parsed(request: Request, data: bytes, parse: Callable[[bytes], Result]) -> Result:
    """Return `parse(data)`, which runs off the event loop unless `data` is short."""
    if len(data) <= THREAD_BODY_BYTES:
        return parse(data)
    async with request.app.state.heavy_bodies if len(data) > HEAVY_BODY_BYTES else contextlib.nullcontext():
        return await asyncio.to_thread(parse, data)


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` that documents a body read by `json_body`."""
    schema = model.model_json_schema()
    content = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"content": {"application/json": {"schema": content}}}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Return `node` with each `$ref` replaced by its definition: an operation's schema cannot hold definitions."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}


def parse_body(model: type[Model], data: bytes, known: KnownLists | None = None) -> Model:
    """Decode and validate as `validated` does; raises `BadRequest` for invalid JSON, and `TooLarge`.

    With `known`, lists of tensors that are valid stay JSON, in `lists` of the body.
    """
    try:
        raw, lists = decode(data, model, known) if data.strip() else ({}, None)
    except INVALID as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    body = validated(model, raw)
    body.lists = lists
    return body


def validated(model: type[Model], raw: Any) -> Model:
    """Return `raw` as a `model`.  Raises `BadRequest` or `UnsupportedFeature`, which name the field and its fault."""
    if not isinstance(raw, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        body = model.model_validate(raw)
    except ValidationError as error:
        raise BadRequest(_describe(error)) from None
    body.unknown = unknown_fields(model, raw)
    return body


def _describe(error: ValidationError) -> str:
    """Return pydantic's first complaint, without its names for the arms of a union."""
    item = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in item["loc"] if isinstance(part, int) or str(part).isidentifier()]
    return f"{'.'.join(path[:3]) or 'body'}: {item['msg']}"


def describe_query(error: RequestValidationError) -> str:
    """Describe what is wrong with the parameters in a URL."""
    return "; ".join(f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors())


async def read_limited(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """Return the body.  Raises `ClientGone`, and `TooLarge` as soon as more than `limit` bytes are declared or come."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"the body has {declared} bytes; the limit is {limit}")
    chunks: list[bytes] = []
    size, more = 0, True
    while more:  # as `request.stream()` does it, in a third of the time
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed the connection")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise TooLarge(f"the body is over the limit of {limit} bytes")
        more = message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


# --- unknown fields ----------------------------------------------------------------------------------------------


def note_unknown(request: Request, fields: list[UnknownField]) -> None:
    """Have the answer name these fields.  Raises `BadRequest` under --strict-requests."""
    if not fields:
        return
    if request.app.state.strict_requests:
        raise BadRequest(unknown_field(*fields[0]))
    request.state.ignored_fields = [*_noted(request), *(shown(field.path) for field in fields)]


class NamingRoute(DirectRoute):
    """A route whose answers name the unknown fields of the request, with a "?" before a field of the URL."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def naming(request: Request) -> Response:
            if request.scope["query_string"]:
                known = self._query_names
                note_unknown(
                    request, [UnknownField(f"?{name}", known) for name in request.query_params if name not in known]
                )
            response = await handler(request)
            ignored = _noted(request)
            return named(response, ignored) if ignored else response

        return naming

    @functools.cached_property
    def _query_names(self) -> frozenset[str]:
        names: set[str] = set()
        for field in self.dependant.query_params:
            model = body_in(field.field_info.annotation)
            names |= {field.alias} if model is None else model.model_fields.keys()
        return frozenset(names)


def named(response: Response, ignored: list[str]) -> Response:
    """Return `response` with the names of `ignored` fields: in its JSON if that is an object, else in a header."""
    if response.media_type == "application/json" and response.body:
        content = msgspec.json.decode(response.body)
        if isinstance(content, dict):
            return Response(
                encode_json(content | {"ignored_fields": ignored}), response.status_code, media_type="application/json"
            )
    response.headers[IGNORED_HEADER] = encode_json(ignored).decode()
    return response


def _noted(request: Request) -> list[str]:
    return getattr(request.state, "ignored_fields", [])


# --- disconnects -------------------------------------------------------------------------------------------------


class ClientGone(LockstepError):
    """The client closed the connection before its answer was ready; the answer is discarded."""

    status_code = CLIENT_CLOSED_REQUEST


async def until_disconnect(scope: Scope, receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`.  If the client goes away first, cancel it and raise `ClientGone`."""
    task = asyncio.current_task()
    assert task is not None
    watch = _Watch(task)
    watch.begin(scope, receive)
    try:
        return await work
    except asyncio.CancelledError:
        # Somebody else may cancel this task, too.
        if watch.is_gone and task.uncancel() == 0:
            raise ClientGone("the client closed the connection") from None
        raise
    finally:
        watch.end()


class _Watch:
    """The watch for a client that goes away, which cancels `task`.  `is_gone` tells of it.

    A server whose scope has `WATCH_DISCONNECT` calls when it happens.  Of others a second task has to wait for it.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.is_gone = False
        self._task = task
        self._waiting: asyncio.Task[None] | None = None
        self._stop: Callable[[], None] | None = None

    def begin(self, scope: Scope, receive: Receive) -> None:
        watch: WatchDisconnect | None = scope.get("extensions", {}).get(WATCH_DISCONNECT)
        if watch is not None:
            self._stop = watch(self._gone)
        else:
            self._waiting = asyncio.create_task(self._wait(receive))

    def end(self) -> None:
        if self._stop is not None:
            self._stop()
        if self._waiting is not None:
            self._waiting.cancel()

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        self.is_gone = True
        self._task.cancel()


class SseForm(NamedTuple):
    """The frame around the events of a stream: what comes before and after each, the event of an error, and the end."""

    before: bytes
    after: bytes
    error: Callable[[Exception], bytes]
    end: bytes


class SseResponse(StreamingResponse):
    """Server-sent events from a generator of JSON bytes, ended by `data: [DONE]`, or as another `form` has them.

    An error of the generator becomes an event with `error`.  A client that goes away closes the generator.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None], form: SseForm | None = None
    ) -> None:
        """Wrap the generator.  `on_close` is called however the stream ends, also when it never began."""
        self._framed = framed(events, form or DATA_EVENTS)
        self._on_close = on_close
        super().__init__(self._framed, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone, OSError):
                await until_disconnect(scope, receive, self.stream_response(send))
        finally:
            await self._framed.aclose()
            self._on_close()


async def framed(events: AsyncGenerator[bytes, None], form: SseForm) -> AsyncGenerator[bytes, None]:
    """Yield the events with their frames, then the end of the form.  An error becomes the last event."""
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                yield form.before + event + form.after
        except Exception as error:
            if status_of(error) == 500:
                logger.exception("a stream failed")
            yield form.error(error)
    if form.end:
        yield form.end


def named_event(content: dict[str, Any]) -> bytes:
    """Return an event that has the name of its `type`."""
    return f"event: {content['type']}\ndata: ".encode() + encode_json(content) + b"\n\n"


def _error_event(error: Exception) -> bytes:
    status = status_of(error)
    content = error_content(error) | {"code": status, "retryable": status == 503}
    return b"data: " + encode_json({"error": content}) + b"\n\n"


DATA_EVENTS = SseForm(b"data: ", b"\n\n", _error_event, b"data: [DONE]\n\n")

"""The answers of control endpoints: one reply shape, one refusal shape, one way to add a route.

A refusal is `{"success": false, "message", "error": {"type", "message"}}` with its status; none can end the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from rollout.core.errors import status_of
from rollout.core.messages.message import ControlReqOutput
from rollout.http import protocol
from rollout.http.direct import Handler
from rollout.http.io import NamingRoute, body_schema, describe_query, error_content, json_response, logger


class ControlRoute(NamingRoute):
    """A route whose errors take the control endpoints' shape."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                return refusal("BadRequest", describe_query(error), 400)
            except Exception as error:
                if status_of(error) == 500:
                    logger.exception("%s failed", request.url.path)
                content = error_content(error)
                return refusal(content["type"], content["message"], status_of(error))

        return guarded


def add_route(
    router: APIRouter, path: str, handler: Callable[..., Any], body: type[protocol.Body], *methods: str, **options: Any
) -> None:
    """Add `handler` for POST, unless other `methods` are given.  `options`: further arguments of FastAPI's.

    Each method has a route of its own, and with it an operation id of its own.
    """
    for method in methods or ("POST",):
        extra = body_schema(body) if method == "POST" else None
        router.add_api_route(path, handler, methods=[method], openapi_extra=extra, **options)


def reply(answer: ControlReqOutput[Any], extra: dict[str, Any] | None = None) -> Response:
    """Return the answer in the common shape, with the fields of the verb's reply at the top level."""
    if answer.success:
        return json_response(reply_fields(answer) | (extra or {}) | {"success": True, "message": answer.message})
    return refusal(answer.error_type, answer.message, failed_status(answer))


def reply_fields(answer: ControlReqOutput[Any]) -> dict[str, Any]:
    """Return the fields of a successful verb's reply, as plain values that JSON can hold."""
    return msgspec.to_builtins(answer.reply)  # type: ignore[no-any-return]


def refusal(kind: str, message: str, status_code: int) -> Response:
    return json_response(refusal_content(kind, message), status_code)


def refusal_content(kind: str, message: str) -> dict[str, Any]:
    return {"success": False, "message": message, "error": {"type": kind, "message": message}}


def failed_status(answer: ControlReqOutput[Any]) -> int:
    return answer.status_code if answer.status_code >= 400 else 400

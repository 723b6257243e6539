"""The routes of all control verbs, made from their declarations.

Each declared path becomes a route.  The route reads its body or URL as the verb's fields, sends the verb, and returns
the reply in the declared shape.  Verbs that need more than that have responders, which other files hand in.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of functions that are made here.
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from rollout.core.messages.io_struct import VERBS
from rollout.core.messages.message import AnyReply, ControlReqInput, ControlReqOutput
from rollout.http.control.body import body_of, fields_of
from rollout.http.control.io import ControlRoute, add_route, reply, reply_fields
from rollout.http.io import NamingRoute, json_body, json_response
from rollout.http.metrics.metrics import Metrics
from rollout.http.protocol import Body
from rollout.tokenizer_manager.manager import TokenizerManager

Responder = Callable[[Request, Any], Awaitable[Response]]
"""A function of the request and its body."""
RouteFunction = Callable[..., Awaitable[Response]]
"""A function that FastAPI calls."""


class VerbRoutes:
    """Sends verbs, and makes their routes; the routes of other dialects send theirs through it, too."""

    def __init__(self, manager: TokenizerManager, metrics: Metrics) -> None:
        self._manager = manager
        self._metrics = metrics

    async def ask(self, verb: type[ControlReqInput[AnyReply]], **fields: Any) -> ControlReqOutput[AnyReply]:
        """Send the verb, and return its answer."""
        started = time.monotonic()
        answer = await self._manager.control(verb, **fields)
        if verb.endpoint.timed_as is not None:
            self._metrics.on_weight_load(verb.endpoint.timed_as, time.monotonic() - started)
        return answer

    async def respond(self, verb: type[ControlReqInput[Any]], body: Body) -> Response:
        """Send the verb with the fields of `body`, and return the reply in its declared shape."""
        answer = await self.ask(verb, **fields_of(verb, body))
        if verb.endpoint.shape == "status":
            return reply(answer, {"status": "ok"})
        if verb.endpoint.shape == "bare" and answer.success:
            return json_response(reply_fields(answer))
        return reply(answer)

    def routers(
        self,
        responders: Mapping[type[ControlReqInput[Any]], Responder],
        functions: Mapping[type[ControlReqInput[Any]], RouteFunction],
    ) -> tuple[APIRouter, APIRouter]:
        """Return the routes that may demand the admin key, and the routes that take the API key.

        `responders` answer for a verb once its body is read; `functions` read the request themselves.
        """
        admin, api = APIRouter(route_class=ControlRoute), APIRouter(route_class=NamingRoute)
        for verb in VERBS:
            if verb.endpoint.path is None:
                continue
            router = admin if verb.endpoint.key == "admin" else api
            for method in verb.endpoint.methods:
                function = functions.get(verb) or self._function(verb, method, responders.get(verb))
                for path in (verb.endpoint.path, *verb.endpoint.aliases):
                    self._add(router, verb, method, path, function)
        return admin, api

    @staticmethod
    def _add(
        router: APIRouter, verb: type[ControlReqInput[Any]], method: str, path: str, function: RouteFunction
    ) -> None:
        endpoint = verb.endpoint
        options: dict[str, Any] = {
            "name": path.strip("/"),
            "description": inspect.cleandoc(verb.__doc__ or ""),
            "tags": [endpoint.tag],
        }
        if method in endpoint.query:
            router.add_api_route(path, function, methods=[method], **options)
        else:
            add_route(router, path, function, body_of(verb), method, **options)

    def _function(self, verb: type[ControlReqInput[Any]], method: str, responder: Responder | None) -> RouteFunction:
        model = body_of(verb)
        source = Query() if method in verb.endpoint.query else Depends(json_body(model))

        async def handle(request: Request, body: Annotated[model, source]) -> Response:  # type: ignore[valid-type]
            return await (self.respond(verb, body) if responder is None else responder(request, body))

        return handle

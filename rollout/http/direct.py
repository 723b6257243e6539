"""The short way of a request to its route: one look-up by method and path, and no arguments for FastAPI to read.

FastAPI asks one route after the other whether it matches, and makes the arguments of a function anew for each call.
That takes twice as long as all else that the HTTP process does for a control verb.  Most functions here take nothing
but the request and its body, so that they can be called at once.  Their routes stay FastAPI's for all else: OpenAPI,
other methods and unknown paths.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Annotated, Any, get_args, get_origin

from fastapi import APIRouter, Request
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.core.errors import LockstepError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
"""A function that answers a request."""
OnError = Callable[[BaseException], Response]


class DirectRoute(APIRoute):
    """A route whose function is called without FastAPI where it takes what `direct_handler` can read."""

    @property
    def is_direct(self) -> bool:
        return direct_handler(self.endpoint) is not None

    def get_route_handler(self) -> Handler:
        return direct_handler(self.endpoint) or super().get_route_handler()


class DirectRoutes:
    """Answers requests for direct routes, and passes all others on to the application.

    `on_error` makes the answers to errors that have a status of their own.
    """

    def __init__(self, app: ASGIApp, *, handlers: dict[tuple[str, str], Handler], on_error: OnError) -> None:
        self._app = app
        self._handlers = handlers
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive, send))
        except (LockstepError, HTTPException) as error:
            response = self._on_error(error)
        await response(scope, receive, send)


def direct_handlers(routers: Iterable[APIRouter]) -> dict[tuple[str, str], Handler]:
    """Return the handlers of direct routes by method and path.  Of two routes for a request the first one counts."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    return {
        (method, route.path): route.get_route_handler()
        for route in routes
        for method in route.methods or ()
        if isinstance(route, DirectRoute) and route.is_direct and not route.param_convertors
        if _first(routes, method, route.path) is route
    }


def _first(routes: Iterable[APIRoute], method: str, path: str) -> APIRoute | None:
    return next((route for route in routes if method in (route.methods or ()) and route.path_regex.match(path)), None)


def direct_handler(function: Callable[..., Any]) -> Handler | None:
    """Return a function of a request that calls `function`; None if FastAPI has to read its arguments.

    An argument is the request, or what a dependency makes of the request alone.
    """
    signature = inspect.signature(function, eval_str=True)
    returned = signature.return_annotation
    is_answer = isinstance(returned, type) and issubclass(returned, Response)
    readers = {name: _reader(parameter.annotation) for name, parameter in signature.parameters.items()}
    if not (is_answer and inspect.iscoroutinefunction(function)) or None in readers.values():
        return None
    known = {name: reader for name, reader in readers.items() if reader is not None}

    async def call(request: Request) -> Response:
        return await function(**{name: await read(request) for name, read in known.items()})  # type: ignore[no-any-return]

    return call


def _reader(annotation: Any) -> Callable[[Request], Awaitable[Any]] | None:
    """Return the function that makes an argument of this type from the request, or None."""
    if annotation is Request:
        return _whole
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    dependency = marks[0].dependency if len(marks) == 1 and isinstance(marks[0], Depends) else None
    if not inspect.iscoroutinefunction(dependency):
        return None
    taken = [each.annotation for each in inspect.signature(dependency, eval_str=True).parameters.values()]
    return dependency if taken == [Request] else None


async def _whole(request: Request) -> Request:
    return request

"""Unknown fields of a body: named in the answer, or refused by --strict-requests.

A null asks for nothing, and so does a field of another server that is harmless here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, get_args

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from rollout.core.errors import BadRequest
from rollout.core.known_fields import MAX_IGNORED, shown, unknown_field
from rollout.http.protocol import Body, UnknownField
from rollout.tokenizer_manager.response import encode_json

HEADER = "x-ignored-fields"
"""The header of an answer that has no place for them; a list in JSON."""


def unknown_fields(model: type[Body], raw: Mapping[str, Any]) -> list[UnknownField]:
    """Return the first `MAX_IGNORED` unknown fields of a body, also in bodies inside it."""
    return list(itertools.islice(_unknown(model, raw, ""), MAX_IGNORED))


def note_unknown(request: Request, fields: list[UnknownField]) -> None:
    """Have the answer name these fields.  Raises `BadRequest` under --strict-requests."""
    if not fields:
        return
    if request.app.state.strict_requests:
        raise BadRequest(unknown_field(*fields[0]))
    request.state.ignored_fields = [*_noted(request), *(shown(field.path) for field in fields)]


class NamingRoute(APIRoute):
    """A route whose answers name the unknown fields of the request, with a "?" before a field of the URL."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def naming(request: Request) -> Response:
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
            model = _body_in(field.field_info.annotation)
            names |= {field.alias} if model is None else model.model_fields.keys()
        return frozenset(names)


def named(response: Response, ignored: list[str]) -> Response:
    """`response` with the names: in its JSON if that is an object, else in a header."""
    if response.media_type == "application/json" and response.body:
        content = msgspec.json.decode(response.body)
        if isinstance(content, dict):
            return Response(
                encode_json(content | {"ignored_fields": ignored}), response.status_code, media_type="application/json"
            )
    response.headers[HEADER] = encode_json(ignored).decode()
    return response


def _noted(request: Request) -> list[str]:
    return getattr(request.state, "ignored_fields", [])


def _unknown(model: type[Body], raw: Mapping[str, Any], place: str) -> Iterator[UnknownField]:
    known = known_names(model)
    for name, value in raw.items():
        if value is not None and name not in known:
            yield UnknownField(place + name, known)
    for name, inner in _inner_bodies(model).items():
        value = raw.get(name)
        if isinstance(value, dict):
            yield from _unknown(inner, value, f"{place}{name}.")
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, dict):
                    yield from _unknown(inner, each, f"{place}{name}[{index}].")


@functools.cache
def known_names(model: type[Body]) -> frozenset[str]:
    """Names that are honoured, refused by name, or harmless."""
    return frozenset({*model.model_fields, *model.unsupported, *model.other_names, *model.harmless})


@functools.cache
def _inner_bodies(model: type[Body]) -> dict[str, type[Body]]:
    """The fields that hold bodies, or lists of them."""
    found = {name: _body_in(item.annotation) for name, item in model.model_fields.items()}
    return {name: inner for name, inner in found.items() if inner is not None}


def _body_in(kind: Any) -> type[Body] | None:
    if isinstance(kind, type) and issubclass(kind, Body):
        return kind
    return next((inner for arm in get_args(kind) if (inner := _body_in(arm)) is not None), None)

"""`rollout.http.direct`: which functions are called directly, and for which requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient

from rollout.http import direct
from rollout.http.direct import DirectRoute, DirectRoutes, direct_handler, direct_handlers
from rollout.http.io import NamingRoute, error_response, json_body
from rollout.http.protocol import AbortRequest
from rollout.server import app as application
from tests.http_harness import live_server

Body = Annotated[AbortRequest, Depends(json_body(AbortRequest))]


async def of_request(request: Request) -> Response:
    return PlainTextResponse(f"direct {request.url.path}")


async def of_body(body: Body) -> PlainTextResponse:
    return PlainTextResponse(f"rid {body.rid}")


async def of_query(request: Request, limit: Annotated[int, Query()] = 1) -> Response:
    return PlainTextResponse(f"limit {limit}")


async def of_path(name: str) -> Response:
    return PlainTextResponse(f"name {name}")


async def of_values(request: Request) -> dict[str, int]:
    return {"value": 1}


def of_thread(request: Request) -> Response:
    return PlainTextResponse("thread")


def _paged(limit: int = 1) -> int:
    return limit


async def of_other(request: Request, limit: Annotated[int, Depends(_paged)]) -> Response:
    return PlainTextResponse(f"limit {limit}")


@pytest.mark.parametrize("function", [of_request, of_body])
def test_a_function_of_request_and_body_is_direct(function: Callable[..., Any]) -> None:
    assert direct_handler(function) is not None


@pytest.mark.parametrize("function", [of_query, of_path, of_values, of_thread, of_other])
def test_a_function_that_needs_fastapi_is_not(function: Callable[..., Any]) -> None:
    assert direct_handler(function) is None


def _routers() -> list[APIRouter]:
    first, second = APIRouter(route_class=DirectRoute), APIRouter(route_class=DirectRoute)
    first.add_api_route("/items/{name}", of_path)
    first.add_api_route("/files/{name}", of_request)
    first.add_api_route("/own", of_request)
    second.add_api_route("/items/all", of_request)
    second.add_api_route("/own", of_body)
    second.add_api_route("/own", of_body, methods=["POST"])
    return [first, second]


def _client(routers: list[APIRouter], handlers: dict[tuple[str, str], direct.Handler]) -> TestClient:
    app = FastAPI()
    for router in routers:
        app.include_router(router)
    app.add_middleware(DirectRoutes, handlers=handlers, on_error=error_response)
    return TestClient(app)


def test_the_first_route_that_matches_answers() -> None:
    routers = _routers()
    handlers = direct_handlers(routers)
    assert handlers.keys() == {("GET", "/own"), ("POST", "/own")}
    client = _client(routers, handlers)
    assert client.get("/items/all").text == "name all"
    assert client.get("/files/a").text == "direct /files/a"
    assert client.get("/own").text == "direct /own"


def test_a_table_of_all_routes_would_answer_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    routers = _routers()
    monkeypatch.setattr(direct, "_first", lambda routes, method, path: next(r for r in routes if r.path == path))
    assert _client(routers, direct_handlers(routers)).get("/items/all").text == "direct /items/all"


def test_the_calls_of_a_refresh_are_direct(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[dict[tuple[str, str], direct.Handler]] = []

    def noted(routers: list[APIRouter]) -> dict[tuple[str, str], direct.Handler]:
        tables.append(direct_handlers(routers))
        return tables[-1]

    monkeypatch.setattr(application, "direct_handlers", noted)
    with live_server(folder):
        pass
    paths = ("begin_weight_update", "update_weights_from_distributed", "end_weight_update", "pause_generation")
    assert {("POST", f"/{path}") for path in (*paths, "generate")} | {("GET", "/health")} <= tables[0].keys()


def test_the_route_of_a_direct_function_names_unknown_fields_of_the_url() -> None:
    router = APIRouter(route_class=NamingRoute)
    router.add_api_route("/own", of_request)
    client = _client([router], direct_handlers([router]))
    client.app.state.strict_requests = False  # type: ignore[attr-defined]
    assert client.get("/own?other=1").headers["x-ignored-fields"] == '["?other"]'

"""Requests that go to their routes directly are answered as FastAPI answers them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter

from rollout.http import direct
from rollout.http.direct import direct_handler
from rollout.server import app as application
from tests.http_harness import Live, live_server

BUCKET = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]], "update_id": "u"}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/health", {}),
    ("GET", "/health?verbose=1", {}),
    ("GET", "/weight_version", {}),
    ("HEAD", "/weight_version", {}),
    ("GET", "/weight_update?update_id=u&other=1", {}),
    ("POST", "/begin_weight_update", {"json": {"update_id": "u"}}),
    ("POST", "/begin_weight_update", {"json": {"update_id": "", "manifest": {}}}),
    ("POST", "/begin_weight_update", {"content": b"{"}),
    ("POST", "/begin_weight_update", {"content": b"[1]"}),
    ("POST", "/begin_weight_update", {}),
    ("POST", "/begin_weight_update?lease_s=3", {"json": {"leases_s": 2}}),
    ("GET", "/begin_weight_update", {}),
    ("POST", "/begin_weight_update/", {"json": {}}),
    ("POST", "/begin_weight%5Fupdate", {"json": {"update_id": "u"}}),
    ("POST", "/update_weights_from_distributed", {"json": BUCKET}),
    ("POST", "/update_weights_from_distributed", {"json": BUCKET | {"shapes": [["x"]]}}),
    ("POST", "/end_weight_update", {"json": {"phase": "other"}}),
    ("POST", "/end_weight_update", {"json": {"phase": "verify"}}),
    ("POST", "/abort_request", {"json": {"rid": "r"}}),
    ("POST", "/generate", {"json": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}, "rid": "r"}}),
    ("PUT", "/generate", {"json": {"input_ids": "none"}}),
    ("POST", "/generate", {"content": b"x" * ((64 << 20) + 1)}),
    ("POST", "/tokenize", {"json": {"prompt": "a", "unknown": 1}}),
    ("POST", "/v1/completions", {"json": {"prompt": [1], "max_tokens": -1}}),
    ("GET", "/v1/models/none", {}),
    ("GET", "/none", {}),
]
UNEQUAL = {"e2e_latency", "decode_throughput"}


@pytest.fixture(scope="module")
def both(folder: Path) -> Iterator[tuple[Live, Live]]:
    """Yield a server, and one whose requests all go through FastAPI."""
    with live_server(folder) as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(application, "direct_handlers", lambda routers: {})
        patch.setattr(direct, "direct_handler", lambda function: None)
        with live_server(folder) as plain:
            yield ours, plain


@pytest.mark.parametrize(("method", "path", "options"), REQUESTS)
def test_answers_are_those_of_fastapi(both: tuple[Live, Live], method: str, path: str, options: dict[str, Any]) -> None:
    ours, plain = (_seen(live.client.request(method, path, **options)) for live in both)
    assert ours == plain


def test_a_function_called_without_its_route_would_answer_otherwise(both: tuple[Live, Live], folder: Path) -> None:
    key, request = ("POST", "/tokenize"), ("POST", "/tokenize", {"prompt": "a", "unknown": 1})

    def bare(routers: list[APIRouter]) -> dict[tuple[str, str], direct.Handler]:
        route = next(each for router in routers for each in router.routes if getattr(each, "path", "") == key[1])
        handler = direct_handler(route.endpoint)  # type: ignore[attr-defined]
        assert handler is not None
        return {key: handler}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(application, "direct_handlers", bare)
        with live_server(folder) as wrong:
            method, path, body = request
            assert _seen(wrong.client.request(method, path, json=body)) != _seen(
                both[0].client.request(method, path, json=body)
            )


def _seen(answer: Any) -> tuple[int, dict[str, str], Any]:
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "x-start-id")}
    if not (answer.content and headers.get("content-type", "").startswith("application/json")):
        return answer.status_code, headers, answer.text
    del headers["content-length"]
    return answer.status_code, headers, _lasting(answer.json())


def _lasting(content: Any) -> Any:
    """Return the content without what differs from call to call."""
    if not isinstance(content, dict):
        return content
    return {name: _lasting(value) for name, value in content.items() if name not in UNEQUAL and "time" not in name}

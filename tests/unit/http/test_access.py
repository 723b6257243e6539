"""Keys, the names of this server, and pages of other sites: which calls are let in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import serve_parser, server_args_from_namespace
from rollout.core.args.sources import parse_words
from rollout.core.errors import StartupError
from tests.http_harness import Live, live_server

ONE_TOKEN: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}


@pytest.mark.parametrize("key", ["", " ", " k"])
@pytest.mark.parametrize("flag", ["api_key", "admin_api_key"])
def test_engine_08_an_empty_key_is_an_error(flag: str, key: str) -> None:
    with pytest.raises(StartupError, match="--" + flag.replace("_", "-")):
        check_settings(ServerArgs(host="0.0.0.0", **{"api_key": "k", flag: key}))


FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"host": "evil.example:30000", "origin": "http://evil.example:30000"},
    {"host": "evil.example:30000"},
    {"host": "127.0.0.1.evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://localhost:3000", "host": "localhost:30000"},
]
STATE_CHANGING = [
    ("POST", "/generate"),
    ("POST", "/weights_checker"),
    ("POST", "/update_weight_version"),
    ("POST", "/abort_request"),
    ("GET", "/flush_cache"),
    ("GET", "/weights_checker"),
    ("GET", "/release_memory_occupation"),
    ("POST", "/v1/chat/completions"),
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_engine_15_w13_pages_of_other_sites_are_refused(live: Live, headers: dict[str, str]) -> None:
    live.scheduler.received.clear()
    for method, path in STATE_CHANGING:
        content = b'{"new_version": "evil", "input_ids": [1]}' if method == "POST" else None
        reply = live.client.request(method, path, headers=headers | {"content-type": "text/plain"}, content=content)
        assert reply.status_code == 403 and set(reply.json()["error"]) == {"type", "message"}, path
    assert live.scheduler.received == []
    assert live.client.get("/health", headers=headers).status_code == 200


def test_engine_15_w13_trainers_curl_and_the_own_pages_pass(live: Live) -> None:
    port = httpx.URL(live.url).port
    for headers in (
        {},
        {"host": "localhost"},
        {"host": f"localhost:{port}", "origin": f"http://localhost:{port}", "sec-fetch-site": "same-origin"},
        {"host": "[::1]:30000"},
        {"host": "10.0.0.7:30000"},
        {"sec-fetch-site": "none"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "text/plain"},
    ):
        assert live.client.post("/generate", json=ONE_TOKEN, headers=headers).status_code == 200, headers
        assert live.client.get("/flush_cache", headers=headers).status_code == 200, headers


def test_engine_15_w13_names_can_be_allowed_and_keys_need_no_names(folder: Path) -> None:
    evil = {"host": "evil.example"}
    with live_server(folder, allowed_hosts="engine.example, other") as live:
        for headers in ({"host": "engine.example:80"}, {"origin": "https://engine.example"}, {"host": "OTHER"}):
            assert live.client.get("/flush_cache", headers=headers).status_code == 200, headers
        assert live.client.get("/flush_cache", headers=evil).status_code == 403
    with live_server(folder, api_key="k") as live:
        headers = {"authorization": "Bearer k", "origin": "http://evil.example"}
        assert live.client.get("/flush_cache", headers=headers | evil).status_code == 200


def test_engine_15_w13_beyond_this_machine_only_pages_are_held_to_names(folder: Path) -> None:
    with live_server(folder, host="0.0.0.0", allow_unauthenticated=True) as live:
        assert live.client.get("/flush_cache", headers={"host": "engine-0.svc.cluster.local"}).status_code == 200
        for headers in FOREIGN[:3]:
            assert live.client.post("/abort_request", headers=headers).status_code == 403


def parsed(*words: str) -> ServerArgs:
    namespace, _ = parse_words(serve_parser(), ["--model-path", "m", *words], os.environ)
    return server_args_from_namespace(namespace)


def test_engine_22_keys_come_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("from a file\n")
    monkeypatch.setenv("LOCKSTEP_API_KEY", "from the environment")
    args = parsed("--admin-api-key", f"@{file}")
    assert (args.api_key, args.admin_api_key) == ("from the environment", "from a file")
    assert parsed("--api-key", "given").api_key == "given"
    monkeypatch.setenv("LOCKSTEP_API_KEY", "")
    with pytest.raises(StartupError, match="empty"):
        parsed()
    with pytest.raises(StartupError, match="--admin-api-key @"):
        parsed("--api-key", "given", "--admin-api-key", f"@{tmp_path}/none")

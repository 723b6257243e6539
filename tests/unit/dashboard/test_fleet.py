"""`lockstep dashboard`: it asks servers with their key, shows what they answer, and answers this machine alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rollout.dashboard.fleet import Engine, FleetPage
from rollout.dashboard.fleet_flags import parser
from tests.dashboard_harness import in_loop
from tests.http_harness import Live, live_server
from tests.ports import free_ports_in_a_row
from tests.tiny_tokenizer import write_model_folder

KEY = "very-secret"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, api_key=KEY) as server:
        in_loop(server, server.history.sample())
        yield server


def asked(*urls: str, key: str | None = KEY, times: int = 1) -> dict[str, Any]:
    """Return the page's data after it has asked these servers."""
    page = FleetPage(urls, key)

    async def ask() -> None:
        for _ in range(times):
            await page.ask()
        for engine in page._engines:
            await engine.close()

    asyncio.run(ask())
    client = TestClient(page.app(), base_url="http://127.0.0.1:30080")  # without its life: it asks no more
    found: dict[str, Any] = client.get("/fleet/data").json()
    assert KEY not in client.get("/fleet/data").text + client.get("/").text
    return found


def test_servers_are_shown_with_their_state_or_their_trouble(live: Live) -> None:
    nobody = f"http://127.0.0.1:{free_ports_in_a_row(1)}"
    found = asked(live.url, nobody, live.url)
    first, second = found["engines"]
    assert first["trouble"] is None and first["state"]["weight_version"] == "v0" and first["server"]["model"] == "tiny"
    assert (second["trouble"], second["state"]) == ("cannot be reached", None)
    assert [row["rates"] for row in found["rows"]] == [[None, None]], "a rate takes a second question"


def test_a_rate_comes_with_a_later_sample(live: Live) -> None:
    page = FleetPage([live.url], KEY)

    async def ask() -> None:
        await page.ask()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(live.history.sample(), live.loop))
        await page.ask()
        await page._engines[0].close()

    asyncio.run(ask())
    assert [row["rates"] for _, row in page._rows] == [[None], [0.0]]


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_wrong_key_is_shown_as_the_servers_refusal(live: Live, key: str | None) -> None:
    (engine,) = asked(live.url, key=key)["engines"]
    assert "wrong key" in engine["trouble"]


def test_pages_of_other_names_get_no_data(live: Live) -> None:
    client = TestClient(FleetPage([live.url], KEY).app(), base_url="http://127.0.0.1:30080")
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert client.get("/fleet/data", headers=headers).status_code == 403
    assert client.get("/fleet/data", headers={"host": "localhost:30080"}).status_code == 200
    assert client.get("/fleet/data?since=x").json()["rows"] == []
    assert client.get("/dashboard/files/fleet.js").status_code == 200
    assert client.get("/dashboard/files/history.py").status_code == 404


def test_an_answer_that_is_no_state_is_trouble() -> None:
    async def lost() -> str | None:
        engine = Engine("http://127.0.0.1:1", None)
        try:
            await engine.ask()
        finally:
            await engine.close()
        return engine.trouble

    assert asyncio.run(lost()) == "cannot be reached"


@pytest.mark.parametrize("words", [[], ["ftp://x"], ["http://"], ["http://x/?a=1"], ["x", "--port", "high"]])
def test_words_that_name_no_server_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(words)
    assert end.value.code == 2 and "error: " in capsys.readouterr().err


def test_an_address_without_a_scheme_is_one_of_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ADMIN_API_KEY", KEY)
    args = parser().parse_args(["node-1:30000", "https://node-2/engine/"])
    assert args.urls == ["http://node-1:30000", "https://node-2/engine"] and args.admin_api_key == KEY
    assert KEY not in parser().format_help()

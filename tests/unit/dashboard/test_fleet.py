"""`lockstep dashboard`: it asks servers with their key, shows what they answer, and answers this machine alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from rollout.dashboard.fleet import FleetPage
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


def after(*answers: httpx.Response) -> FleetPage:
    """Return the page after a server has given these answers."""
    left = list(answers)

    async def ask() -> FleetPage:
        page = FleetPage(["http://node-1"], None)
        (engine,) = page._engines
        await engine.close()
        transport = httpx.MockTransport(lambda request: left.pop(0))
        engine._http = httpx.AsyncClient(transport=transport, base_url=engine.url)
        for _ in answers:
            await page.ask()
        await engine.close()
        return page

    return asyncio.run(ask())


def shown_by(page: FleetPage) -> dict[str, Any]:
    (engine,) = TestClient(page.app(), base_url="http://127.0.0.1:30080").get("/fleet/data").json()["engines"]
    return engine


@pytest.fixture
def answer(live: Live) -> dict[str, Any]:
    """An answer of a real server, with a sample of now."""
    in_loop(live, live.history.sample())
    return live.client.get("/dashboard/data", headers={"authorization": f"Bearer {KEY}"}).json()


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (200, "<html>", "not as lockstep"),
        (200, "[]", "not as lockstep"),
        (200, '{"count": 3}', "not as lockstep"),
        (502, "<html>", "status 502"),
        (502, '{"error": "x"}', "status 502"),
        (503, '{"error": {"message": "draining"}}', "refuses with status 503: draining"),
        (404, '{"error": {"message": "Not Found"}}', "--no-enable-metrics"),
    ],
)
def test_an_answer_that_is_no_state_is_trouble(status: int, content: str, words: str) -> None:
    assert words in shown_by(after(httpx.Response(status, text=content)))["trouble"]


@pytest.mark.parametrize("part", ["server", "state"])
def test_a_server_of_another_version_does_not_end_the_page(answer: dict[str, Any], part: str) -> None:
    """Its answer may lack a part that this version shows."""
    old = answer | {part: {name: value for name, value in answer[part].items() if name not in ("withheld", "phase")}}
    page = after(httpx.Response(200, json=answer), httpx.Response(200, json=old))
    found = shown_by(page)
    assert "status 200 and not as lockstep" in found["trouble"] and found["state"]["weight_version"] == "v0"


def test_the_rate_of_an_engine_that_stands_still_is_not_shown(answer: dict[str, Any]) -> None:
    """Its server answers on, without samples."""
    answer["samples"][-1]["generated_per_s"] = 90.0
    later = answer | {"now": answer["now"] + 20, "samples": [], "unanswered": "the scheduler did not answer"}
    page = after(httpx.Response(200, json=answer), httpx.Response(200, json=later))
    assert [row["rates"] for _, row in page._rows] == [[90.0], [None]]
    found = shown_by(page)
    assert found["unanswered"] and found["sample"] == {} and found["state"]["weight_version"] == "v0"


@pytest.mark.parametrize(
    "words", [[], ["ftp://x"], ["http://"], ["http://x/?a=1"], ["x", "--port", "high"], ["x", "--port", "70000"]]
)
def test_words_that_name_no_server_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(words)
    assert end.value.code == 2 and "error: " in capsys.readouterr().err


def test_an_address_without_a_scheme_is_one_of_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ADMIN_API_KEY", KEY)
    args = parser().parse_args(["node-1:30000", "https://node-2/engine/"])
    assert args.urls == ["http://node-1:30000", "https://node-2/engine"] and args.admin_api_key == KEY
    assert KEY not in parser().format_help()

"""`GET /dashboard`: the page and its headers, keys, the history and its bounds, refusals, the route probe."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from rollout.core.messages.experts import EplbState, ExpertLoadState, ExpertLoadWindow
from rollout.core.messages.io_struct import ControlReqOutput, GetStateReqInput
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.core.messages.update_state import EndedUpdateState
from rollout.dashboard import history as kept
from rollout.dashboard import refusals
from rollout.dashboard.history import ServerHistory
from rollout.dashboard.refusals import RefusalLog, reason_in
from rollout.dashboard.route_probe import MAX_TOKENS, flips
from rollout.dashboard.samples import MERGED, MERGED_KEPT, RECENT_KEPT
from rollout.http.metrics.metrics import Metrics
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import NUM_EXPERTS, route_rows
from tests.tiny_tokenizer import write_model_folder

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "rollout/dashboard"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Live]:
    """A server for tests that do not change it."""
    with live_server(folder) as server:
        yield server


@pytest.fixture
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder, weight_version=HOSTILE) as server:
        server.scheduler.version = HOSTILE
        yield server


def in_loop(live: Live, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, live.loop).result(10)


def data_of(live: Live, since: int = 0, **headers: str) -> dict[str, Any]:
    response = live.client.get("/dashboard/data", params={"since": since}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


# --- the page ---------------------------------------------------------------------------------------------------------


def policy_of(response: httpx.Response) -> dict[str, str]:
    parts = response.headers["content-security-policy"].split("; ")
    return {name: value for name, _, value in (part.partition(" ") for part in parts)}


def is_allowed(policy: dict[str, str], kind: str, text: str) -> bool:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return policy[kind] == f"'sha256-{digest}'"


def test_the_page_runs_its_own_scripts_and_nothing_else(shared: Live) -> None:
    response = shared.client.get("/dashboard")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    policy = policy_of(response)
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    assert response.headers["referrer-policy"] == "no-referrer"


def modules_of(script: str) -> list[str]:
    """Return the files that a script imports."""
    return re.findall(r'from "\./([\w.-]+)"', script)


def test_every_file_that_the_page_loads_is_served_without_a_key(folder: Path) -> None:
    with live_server(folder, api_key="user") as live:
        html = live.client.get("/dashboard").text
        waiting, seen = re.findall(r'(?:src|href)="dashboard/files/([\w.-]+)"', html), set()
        while waiting:
            name = waiting.pop()
            found = live.client.get(f"/dashboard/files/{name}")
            assert found.status_code == 200 and found.headers["x-content-type-options"] == "nosniff", name
            kind = "text/css" if name.endswith(".css") else "text/javascript"
            assert found.headers["content-type"].startswith(kind)
            seen.add(name)
            waiting += [one for one in modules_of(found.text) if one not in seen]
        assert {"main.js", "uPlot.iife.min.js"} < seen
        scripts = {path.name for path in (SOURCES / "page").glob("*.js")} - {"fleet.js"}
        assert scripts == {name for name in seen if not name.startswith("uPlot") and name.endswith(".js")}
        for path in ("/dashboard/files/..%2Fhistory.py", "/dashboard/files/history.py", "/dashboard/files/"):
            assert live.client.get(path).status_code in (401, 404)


def test_a_file_that_the_browser_has_is_not_sent_again(shared: Live) -> None:
    first = shared.client.get("/dashboard/files/main.js")
    again = shared.client.get("/dashboard/files/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = shared.client.get("/dashboard/files/main.js", headers={"if-none-match": '"other"'})
    assert other.content == first.content


def test_the_page_holds_no_data(live: Live) -> None:
    assert HOSTILE not in live.client.get("/dashboard").text and "tiny" not in live.client.get("/dashboard").text


WAYS_TO_MARKUP = (
    r"innerHTML", r"outerHTML", r"insertAdjacentHTML", r"document\.write", r"\beval\b", r"new Function", r"DOMParser",
    r"srcdoc", r"createContextualFragment", r"setTimeout\(\s*[\"'`]", r"(local|session)Storage", r"\.cookie",
)  # fmt: skip


def markup_in(script: str) -> list[str]:
    """List the ways by which a text could become markup or code, or a key stay behind."""
    return [way for way in WAYS_TO_MARKUP if re.search(way, script)]


def loaded_by(html: str) -> list[str]:
    """Return the addresses that a page would load from elsewhere."""
    found = re.findall(r"(?:src|href|action)\s*=\s*[\"']?([^\"'>\s]+)|@import|url\(([^)]*)\)", html)
    return [target for pair in found for target in pair if target and target != "data:,"]


def test_the_scripts_make_no_markup_of_what_they_are_sent() -> None:
    scripts = {path.name: path.read_text() for path in SOURCES.rglob("*.js")}
    assert len(scripts) > 10
    assert {name: markup_in(script) for name, script in scripts.items() if markup_in(script)} == {}
    assert markup_in(scripts["dom.js"].replace("textContent =", "innerHTML =")) == ["innerHTML"]


def test_the_page_loads_nothing_from_elsewhere() -> None:
    html = (SOURCES / "page/dashboard.html").read_text() + (SOURCES / "page/page.css").read_text()
    assert all(target.startswith("dashboard/files/") for target in loaded_by(html)) and loaded_by(html)
    assert loaded_by('<script src="https://cdn.example/x.js">') == ["https://cdn.example/x.js"]
    for path in SOURCES.rglob("*.js"):
        assert "import(" not in path.read_text() and "http:" not in path.read_text().replace("http://www.w3.org/", "")


@pytest.mark.parametrize("path", sorted((SOURCES / "page").glob("*.js")), ids=lambda path: path.name)
def test_a_script_is_short_and_states_its_purpose(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400 and lines[0].startswith("// ")


@pytest.mark.parametrize(
    ("package", "folders"),
    [("rollout.dashboard", ("page", "vendor")), ("rollout.http.api_page", (".",))],
    ids=["dashboard", "api_page"],
)
def test_a_wheel_contains_the_page(package: str, folders: tuple[str, ...]) -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package]
    root = ROOT / package.replace(".", "/")
    found = [
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).iterdir()
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert len(found) >= 3 and all(any(fnmatch(name, pattern) for pattern in patterns) for name in found)


def test_the_chart_library_comes_with_its_licence() -> None:
    vendor = SOURCES / "vendor"
    assert "v1.6.32" in (vendor / "uPlot.iife.min.js").read_text()[:200]
    assert "MIT License" in (vendor / "uPlot.LICENSE.txt").read_text()


# --- the first page, and the endpoints --------------------------------------------------------------------------------


def test_the_root_leads_to_the_dashboard_n22(folder: Path, shared: Live) -> None:
    """N22: the root was a 404."""
    found = shared.client.get("/", follow_redirects=False)
    assert (found.status_code, found.headers["location"]) == (307, "dashboard")
    with live_server(folder, enable_metrics=False, api_key="user") as live:
        found = live.client.get("/", follow_redirects=False)
        assert (found.status_code, found.headers["location"]) == (307, "docs")


def test_the_endpoints_are_shown_offline_and_ask_for_the_key_n22(folder: Path, shared: Live) -> None:
    """N22: the page loaded scripts from elsewhere, and was a bare 401 where there is a key."""
    shown = shared.client.get("/docs")
    assert shown.status_code == 200 and shown.headers["content-type"].startswith("text/html")
    sources = ROOT / "rollout" / "http" / "api_page"
    script = (sources / "page.js").read_text()
    assert is_allowed(policy_of(shown), "script-src", script) and markup_in(script) == []
    assert loaded_by((sources / "page.html").read_text() + (sources / "page.css").read_text()) == []
    with live_server(folder, api_key="user") as live:
        asking = live.client.get("/docs")
        assert asking.status_code == 401 and asking.text == shown.text and 'id="keys"' in asking.text
        assert live.client.post("/docs").json()["error"]["type"] == "Unauthorized"
        assert live.client.get("/openapi.json").status_code == 401
        assert live.client.get("/docs", headers={"authorization": "Bearer user"}).status_code == 200


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "right", "wrong"),
    [
        ({"api_key": "user", "admin_api_key": "boss"}, "boss", "user"),
        ({"admin_api_key": "boss"}, "boss", "user"),
        ({"api_key": "user"}, "user", "boss"),
    ],
)
def test_data_take_the_admin_key_and_the_page_takes_none(
    folder: Path, settings: dict[str, str], right: str, wrong: str
) -> None:
    with live_server(folder, **settings) as live:
        assert live.client.get("/dashboard").status_code == 200
        for method, path in (
            *(("GET", f"/dashboard/{name}") for name in ("data", "samples", "sessions", "experts")),
            *(("POST", f"/dashboard/{name}") for name in ("route_probe", "trainer_metrics")),
        ):
            for headers in ({}, {"authorization": f"Bearer {wrong}"}, {"authorization": "Basic Ym9zcw=="}):
                assert live.client.request(method, path, headers=headers).status_code == 401, (path, headers)
            body = {"values": {"kl": 1}} if path.endswith("/trainer_metrics") else None
            allowed = live.client.request(method, path, json=body, headers={"authorization": f"Bearer {right}"})
            assert allowed.status_code == 200, (path, allowed.text)
        assert data_of(live, authorization=f"Bearer {right}")["refusals"] == [], "strangers do not fill the log"


def test_pages_of_other_sites_get_no_data(shared: Live) -> None:
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert shared.client.get("/dashboard/data", headers=headers).status_code == 403, headers
    assert shared.client.get("/dashboard/data", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_no_dashboard_without_metrics(folder: Path) -> None:
    with live_server(folder, enable_metrics=False) as live:
        for path in ("/dashboard", "/dashboard/data"):
            assert live.client.get(path).status_code == 404


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "", str(2**64), "1&since=x", HOSTILE])
def test_a_bad_number_is_one_clear_error(shared: Live, since: str) -> None:
    response = shared.client.get(f"/dashboard/data?since={since}")
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "BadRequest" and error["message"].startswith("query.since:")


# --- history ----------------------------------------------------------------------------------------------------------


def a_state(**changes: Any) -> SchedulerState:
    """Return the state of an idle engine with these changes."""
    blank: dict[Any, Any] = {int: 0, float: 0.0, str: "", bool: False}
    fields: dict[str, Any] = {}
    for item in msgspec.structs.fields(SchedulerState):
        if item.required:
            kind = getattr(item.type, "__origin__", item.type)
            fields[item.name] = blank.get(kind, [] if kind is list else {} if kind is dict else None)
    return SchedulerState(**(fields | {"max_total_num_tokens": 100} | changes))


def an_update(number: int, **changes: Any) -> EndedUpdateState:
    update = EndedUpdateState(
        update_id=f"u{number}",
        kind="committed",
        weight_version=f"v{number}",
        weight_epoch=number,
        reason=None,
        num_tensors=3,
        num_bytes=12,
        staging_s=1.5,
        stall_s=0.01,
        steps_held=False,
        ended_at=1000.0 + number,
    )
    return msgspec.structs.replace(update, **changes)


def balancer(*numbers: int) -> EplbState:
    """Return the state of a balancer that ended rebalance number n `5 - n` seconds ago, for each of `numbers`."""
    numbers_of_moves = ("num_experts_moved", "num_bytes", "num_chunks", "chunks_done", "seconds", "longest_chunk_s")
    facts: dict[str, Any] = dict.fromkeys(numbers_of_moves, 1)
    facts |= {"reason": "asked for", "algorithm": "min_move", "dropped": None}
    facts |= {"balancedness_before": {"mean": 0.8, "least": 0.7}, "balancedness_after": None}
    return EplbState(
        stage="idle",
        stuck=None,
        num_evaluations=1,
        last_evaluation_age_s=0.0,
        stage_age_s=0.0,
        chunks_left=0,
        decision=None,
        outcome=None,
        rebalances=[facts | {"number": number, "age_s": 5.0 - number} for number in numbers],
        choices_per_expert=0.0,
        drift=None,
        counts_loads=True,
    )


def record(rank_loads: list[list[int]], *, recording: bool = True, num_passes: int = 4) -> ExpertLoadState:
    windows = [
        ExpertLoadWindow(
            window=window,
            num_passes=4,
            rank_loads=rank_loads,
            rank_balancedness=[0.75] * len(rank_loads),
            slot_balancedness=[None] * len(rank_loads),
        )
        for window in (10, 100, 1000)
    ]
    return ExpertLoadState(
        mode="stat",
        recording=recording,
        num_passes=num_passes,
        num_tokens=9,
        moe_layer_ids=[1],
        windows=windows,
        drift=None,
    )


def samples_of(history: ServerHistory, count: int = 0) -> list[dict[str, Any]]:
    """Return the samples after this number as the page gets them."""
    found: list[dict[str, Any]] = msgspec.to_builtins(history.since(count)["samples"])
    return found


@pytest.fixture
def history(shared: Live) -> ServerHistory:
    """An empty history."""
    return ServerHistory(shared.manager, Metrics("kept"))


def test_rates_are_of_the_time_between_two_samples(history: ServerHistory) -> None:
    history.enter(a_state(num_generated_tokens=1000, num_prompt_tokens=500, num_prompt_tokens_reused=100), 100.0)
    history.enter(a_state(num_generated_tokens=1300, num_prompt_tokens=800, num_prompt_tokens_reused=300), 102.0)
    first, second = samples_of(history)
    assert (first["generated_per_s"], first["prefilled_per_s"]) == (0.0, 0.0)
    assert (second["generated_per_s"], second["prefilled_per_s"]) == (150.0, 50.0)
    history.enter(a_state(num_generated_tokens=1300), 101.0)  # the clock was set back
    assert samples_of(history)[-1]["generated_per_s"] == 0.0


def test_the_history_is_bounded(history: ServerHistory) -> None:
    for number in range(1, 4700):
        history.enter(a_state(ended_updates=[an_update(number)], eplb=balancer(number)), float(number))
    found = history.since(0)
    samples = samples_of(history)
    assert len(samples) < RECENT_KEPT + MERGED + MERGED_KEPT + 1 and samples[-1]["at"] == 4699.0
    assert 3550 < samples[-1]["at"] - samples[0]["at"] < 3700, "an hour"
    assert len(found["updates"]) == kept.UPDATES_KEPT and found["updates"][-1]["weight_version"] == "v4699"
    assert len(found["rebalances"]) == kept.REBALANCES_KEPT and found["rebalances"][-1]["number"] == 4699


def test_each_event_is_told_once(history: ServerHistory) -> None:
    """The scheduler repeats its last events in every state."""
    history.enter(a_state(ended_updates=[an_update(1), an_update(2)], eplb=balancer(1)), 10.0)
    history.enter(a_state(ended_updates=[an_update(1), an_update(2)], eplb=balancer(1)), 11.0)
    before = history.since(0)
    assert [one["weight_version"] for one in before["updates"]] == ["v1", "v2"] and len(before["rebalances"]) == 1
    lost = an_update(3, kind="lost", weight_epoch=None, reason=HOSTILE)
    history.enter(a_state(ended_updates=[an_update(2), lost], eplb=balancer(1, 2)), 12.0)
    news = history.since(before["count"])
    assert [one["reason"] for one in news["updates"]] == [HOSTILE] and len(news["samples"]) == 1
    assert [(one["number"], one["ended_at"]) for one in news["rebalances"]] == [(2, 9.0)]
    assert history.since(news["count"])["samples"] == history.since(10**9)["updates"] == []


def test_what_a_rebalance_came_to_is_told_once_it_is_measured_n30(history: ServerHistory) -> None:
    """N30: only the prediction was shown."""
    history.enter(a_state(eplb=balancer(1, 2)), 10.0)
    before = history.since(0)
    assert [one["balancedness_measured"] for one in before["rebalances"]] == [None, None]
    later = balancer(1, 2, 3)
    later.rebalances[1]["balancedness_measured"] = {"mean": 0.93, "least": 0.9}
    history.enter(a_state(eplb=later), 11.0)
    news = history.since(before["count"])["rebalances"]
    assert [(one["number"], one["balancedness_measured"]) for one in news] == [(2, 0.93), (3, None)]
    assert news[0]["ended_at"] == before["rebalances"][1]["ended_at"]
    assert [one["number"] for one in history.since(0)["rebalances"]] == [1, 2, 3]


def test_an_id_that_is_used_again_is_another_update(history: ServerHistory) -> None:
    """After the scheduler has forgotten it."""
    history.enter(a_state(ended_updates=[an_update(1)]), 1.0)
    history.enter(a_state(ended_updates=[an_update(1, ended_at=9000.0)]), 2.0)
    assert len(history.since(0)["updates"]) == 2


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        (record([[3, 1]]), [0.75]),
        (record([[4]]), [None]),  # one rank: of slots
        (record([[3, 1]], recording=False), None),
        (None, None),
    ],
    ids=["ranks", "slots", "stopped", "never"],
)
def test_balance_is_of_ranks_or_of_slots(
    history: ServerHistory, loads: ExpertLoadState | None, expected: list[float | None] | None
) -> None:
    history.enter(a_state(expert_distribution=loads), 1.0)
    assert samples_of(history)[0]["balance"] == expected


def test_an_idle_engine_has_no_balance(history: ServerHistory) -> None:
    """The balance of the last passes is not shown as the current one."""
    for num_passes in (4, 4, 5):
        history.enter(a_state(expert_distribution=record([[3, 1]], num_passes=num_passes)), 1.0)
    assert [one["balance"] for one in samples_of(history)] == [[0.75], None, [0.75]]


def test_a_sample_is_what_the_scheduler_says(live: Live) -> None:
    in_loop(live, live.history.sample())
    found = data_of(live)
    assert found["state"]["weight_version"] == HOSTILE and found["unanswered"] is None
    assert found["server"]["phase"] == "serving" and found["server"]["model"] == "tiny"
    assert found["answered_at"] == pytest.approx(found["now"], abs=60)
    assert len(found["samples"]) == 1 and data_of(live, found["count"])["samples"] == []


def test_before_the_first_answer_there_is_no_state(live: Live) -> None:
    found = data_of(live)
    assert found["state"] is None and found["answered_at"] is None and found["samples"] == []


def test_a_scheduler_that_does_not_answer_is_told_with_the_reason(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop(live, live.history.sample())
    monkeypatch.setattr(kept, "ANSWER_S", 0.2)
    live.scheduler.answers[GetStateReqInput] = lambda verb: None
    in_loop(live, live.history.sample())
    found = data_of(live)
    assert "did not answer GetState within 0.2 s" in found["unanswered"] and found["state"] is not None
    live.scheduler.answers[GetStateReqInput] = lambda verb: ControlReqOutput(
        request_id=verb.request_id, success=False, message=HOSTILE
    )
    in_loop(live, live.history.sample())
    assert data_of(live)["unanswered"] == HOSTILE
    live.scheduler.answers.clear()
    in_loop(live, live.history.sample())
    assert data_of(live)["unanswered"] is None


def test_the_end_of_the_scheduler_is_told(live: Live) -> None:
    in_loop(live, live.history.sample())
    live.call_in_loop(lambda: live.manager.fail("rank 1 was killed"))
    in_loop(live, live.history.sample())
    found = data_of(live)
    assert found["server"]["phase"] == "failed" and len(found["samples"]) == 1


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals_are_kept_with_their_reasons(live: Live) -> None:
    live.refused(input_ids=[1], sampling_params={"max_new_tokens": -1})
    live.refused(input_ids=[1], sampling_params={"max_new_tokens": -1})
    live.client.get(f"/{HOSTILE}")
    live.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    first, second = data_of(live)["refusals"]
    assert (first["method"], first["path"], first["status"], first["times"]) == ("POST", "/generate", 400, 2)
    assert "max_new_tokens" in first["reason"]
    assert (second["path"], second["status"], second["reason"]) == (f"/{HOSTILE}", 404, "Not Found")


def test_an_unexpected_error_is_answered_and_kept(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(live.manager, "submit", broken)
    assert live.refused(input_ids=[1]) == (500, "internal error: ZeroDivisionError")
    (kept_one,) = data_of(live)["refusals"]
    assert (kept_one["path"], kept_one["status"]) == ("/generate", 500)
    assert kept_one["reason"] == "internal error: ZeroDivisionError"


def test_a_probe_that_hears_503_is_no_error_n32(live: Live) -> None:
    """N32: polls of /ready during the start filled the list of errors."""
    live.client.post("/pause_generation")
    assert live.client.get("/ready").status_code == 503
    live.call_in_loop(lambda: live.manager.fail("rank 1 was killed"))
    for path in ("/health", "/health_generate", "/ready", "/liveness", "/ping"):
        assert live.client.get(path).status_code == 503
    live.client.get("/health/no")
    assert [one["path"] for one in data_of(live)["refusals"]] == ["/health/no"]


def test_the_log_of_refusals_is_bounded() -> None:
    log = RefusalLog()
    for number in range(100):
        log.note("POST" * 100, f"/{number}" * 1000, 400, "why " * 1000)
    entries = log.entries()
    assert len(entries) == refusals.KEPT and entries[-1]["path"].startswith("/99")
    assert all(len(str(entry)) < 1000 for entry in entries)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"error": 5}', b"\xff", b"[" * 10_000, b"x" * 10**6])
def test_a_body_without_a_reason_has_none(body: bytes) -> None:
    assert reason_in(body) == ""
    assert reason_in(b'{"error": {"message": "no"}}') == "no"


# --- flips ------------------------------------------------------------------------------------------------------------


def test_flips_are_of_sets_not_of_orders() -> None:
    before = np.array([[[1, 2], [3, 4]], [[1, 2], [3, 4]]], dtype=np.uint8)
    after = np.array([[[2, 1], [3, 5]], [[1, 2], [4, 3]]], dtype=np.uint8)
    assert flips(before, after).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"text": "a", "input_ids": [1]}, 400, "not both"),
        ({"input_ids": [1]}, 400, "2 to 4096 tokens, got 1"),
        ({"input_ids": []}, 400, "got 0"),
        ({"input_ids": [1] * (MAX_TOKENS + 1)}, 400, f"got {MAX_TOKENS + 1}"),
        ({"input_ids": [1, 10**6]}, 400, "10"),
        ({"input_ids": "x"}, 400, "input_ids"),
        ({"text": "\ud800"}, 400, ""),
        ({"text": ["a", "b"]}, 400, "text"),
    ],
    ids=["both", "one", "none", "many", "vocabulary", "type", "surrogate", "batch"],
)
def test_a_probe_that_cannot_be_is_refused(shared: Live, body: dict[str, Any], status: int, words: str) -> None:
    response = shared.client.post("/dashboard/route_probe", content=json.dumps(body))
    assert response.status_code == status and words in response.json()["error"]["message"], response.text
    assert data_of(shared)["probe_tokens"] is None


def test_a_probe_needs_recorded_routes(folder: Path) -> None:
    with live_server(folder, captures=False) as live:
        assert live.refused("/dashboard/route_probe", input_ids=[1, 2])[0] == 400


def test_a_probe_does_not_wait_for_a_pause(live: Live) -> None:
    live.client.post("/pause_generation")
    assert live.refused("/dashboard/route_probe", input_ids=[1, 2])[0] == 409
    live.client.post("/continue_generation")
    assert live.client.post("/dashboard/route_probe", json={"input_ids": [1, 2]}).status_code == 200


def test_a_refresh_is_measured_once(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version v1 takes other experts for three of the nine rows."""
    assert live.client.post("/dashboard/route_probe", json={"input_ids": list(range(10))}).json()["num_tokens"] == 10
    probed(live)
    assert data_of(live)["flips"] == []

    def rows(start: int, end: int) -> bytes:
        same = route_rows(start, end)
        return same[:-6] + bytes((expert + 1) % NUM_EXPERTS for expert in same[-6:])

    monkeypatch.setattr("tests.stand_in_scheduler.route_rows", rows)
    in_force(live, "v1", 1)
    probed(live)
    probed(live)
    (flip,) = data_of(live)["flips"]
    assert (flip["from_version"], flip["to_version"], flip["num_tokens"]) == (HOSTILE, "v1", 9)
    assert flip["share"] == pytest.approx(3 / 9) and flip["by_layer"] == [pytest.approx(3 / 9, abs=1e-4)]
    assert live.client.post("/dashboard/route_probe", json={}).json()["num_tokens"] is None
    in_force(live, "v2", 2)
    probed(live)
    assert len(data_of(live)["flips"]) == 1


def test_nothing_is_scored_while_paused(live: Live) -> None:
    live.client.post("/dashboard/route_probe", json={"input_ids": [1, 2, 3]})
    in_force(live, "v1", 1, paused=True)
    probed(live)
    assert data_of(live)["flips"] == []
    in_force(live, "v1", 1)
    probed(live)
    assert len(data_of(live)["flips"]) == 1


def test_a_refresh_during_the_probe_gives_no_number(live: Live) -> None:
    """Its rows may be of two versions; the next sample tries again."""
    live.client.post("/dashboard/route_probe", json={"input_ids": [1, 2, 3]})
    epochs = iter([1, 1, 2])
    in_force(live, "v1", lambda: next(epochs))
    probed(live)
    assert data_of(live)["flips"] == []
    in_force(live, "v2", 2)
    probed(live)
    (flip,) = data_of(live)["flips"]
    assert (flip["from_version"], flip["to_version"], flip["to_epoch"]) == (HOSTILE, "v2", 2)


def in_force(live: Live, version: str, epoch: int | Callable[[], int], *, paused: bool = False) -> None:
    """Make the stand-in report this version, epoch and pause from now on."""
    scheduler = live.scheduler
    scheduler.version = version

    def answer(verb: GetStateReqInput) -> ControlReqOutput:
        number = epoch if isinstance(epoch, int) else epoch()
        facts = scheduler._state() | {"weight_epoch": number, "paused": paused}
        return ControlReqOutput(request_id=verb.request_id, success=True, data=facts)

    scheduler.answers[GetStateReqInput] = answer


def probed(live: Live) -> None:
    """Take a sample, and see the probe that follows it through."""

    async def work() -> None:
        await live.history.sample()
        assert live.history._probing is not None
        await live.history._probing

    in_loop(live, work())

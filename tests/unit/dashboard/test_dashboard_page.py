"""`GET /dashboard`: the page, its files and headers, the endpoints of its data, and their keys."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from tests.dashboard_harness import HOSTILE, data_of
from tests.http_harness import Live, live_server

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "rollout/dashboard"


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


def test_the_page_holds_no_data(hostile: Live) -> None:
    assert HOSTILE not in hostile.client.get("/dashboard").text and "tiny" not in hostile.client.get("/dashboard").text


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

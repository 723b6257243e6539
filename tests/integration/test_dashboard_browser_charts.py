"""Charts and tables of the dashboard in a real browser: values, zoom, cursor, marks, experts, narrow windows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chromium import Browser
from tests.dashboard_browser import NEEDS_BROWSER, SETTINGS, generate, hover, move, place
from tests.server_process import ServerProcess

pytest_plugins = ["tests.dashboard_fixtures"]
pytestmark = [pytest.mark.full, NEEDS_BROWSER]


CHARTS = (
    *("throughput", "requests", "kv", "first-token", "per-token", "latency", "staleness", "logprob", "entropy"),
    *("prefix", "ends", "memory", "cpus", "trainer-0", "trainer-1"),
)


def test_each_chart_shows_a_value_of_a_real_server(page: Browser, server: ServerProcess) -> None:
    server.client.report_trainer_metrics({"kl": 0.0021, "reward": 0.5}, step=4)
    body = {"input_ids": [5, 6, 7, 8], "return_logprob": True, "session_id": "agent-7"}
    server.http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 40, "ignore_eos": True}})
    for name in CHARTS:
        page.wait_for(f"lockstep.charts.get({name!r})?.shown.flat().some((value) => value !== null) ?? false")
    assert "0.0021, step 4" in page.text("#legend-trainer-0")
    page.wait_for("lockstep.charts.get('throughput').shown[0].some((value) => value > 0)")
    page.wait_for_text("agent-7", "#sessions")
    assert (
        "length" in page.text("#reasons")
        and page.evaluate("document.querySelectorAll('#chart-lengths .f-one').length") > 0
    )
    assert page.evaluate("document.querySelectorAll('canvas').length") >= len(CHARTS)
    assert page.console == []


def test_dragging_zooms_all_charts_until_it_is_reset(page: Browser) -> None:
    time.sleep(5)
    range_of = "((one) => [one.min, one.max])(lockstep.charts.get({!r}).plot.scales.x)".format
    before = page.evaluate(range_of("throughput"))
    page.wait_for("lockstep.charts.get('throughput').places.length > 4")
    for kind, share in (("mousePressed", 0.3), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
        at = before[0] + share * (before[1] - before[0])
        move(page, kind, *place(page, "throughput", str(at)))
    page.wait_for("lockstep.store.zoom !== null")
    zoomed = page.evaluate(range_of("throughput"))
    assert zoomed[0] == pytest.approx(before[0] + 0.3 * (before[1] - before[0]), abs=2)
    assert zoomed[1] - zoomed[0] < 0.5 * (before[1] - before[0])
    assert page.evaluate(range_of("kv")) == zoomed, "all charts show the same time"
    assert not page.evaluate("document.getElementById('reset').hidden")
    page.evaluate("document.getElementById('reset').click()")
    page.wait_for("lockstep.store.zoom === null && document.getElementById('reset').hidden")
    assert page.evaluate(range_of("kv"))[1] >= before[1]
    assert page.console == []


def record(server: ServerProcess) -> None:
    """Make the server have loads of experts in two of its samples at least."""
    server.http.post("/start_expert_distribution_record", json={})
    for _ in range(3):
        generate(server)
        time.sleep(1.1)


@pytest.mark.parametrize("drawing", ["chart-versions", "chart-balance"])
def test_a_drag_that_outlasts_a_poll_zooms(page: Browser, server: ServerProcess, drawing: str) -> None:
    """These drawings are made anew at each poll."""
    record(server)
    page.wait_for(f"document.querySelector('#{drawing} svg') !== null")
    left, top, width = page.evaluate(
        f"(() => {{ const one = document.querySelector('#{drawing} svg'); one.scrollIntoView({{block: 'center'}});"
        "const box = one.getBoundingClientRect(); return [box.left + 52, box.top + 20, box.width - 62]; })()"
    )
    for kind, share in (("mouseMoved", 0.2), ("mousePressed", 0.2), ("mouseMoved", 0.5)):
        move(page, kind, left + share * width, top)
    time.sleep(2.2)
    for kind in ("mouseMoved", "mouseReleased"):
        move(page, kind, left + 0.7 * width, top)
    page.wait_for("lockstep.store.zoom !== null")
    assert page.console == []


def test_a_time_without_loads_has_no_legend_of_the_balance(page: Browser, server: ServerProcess) -> None:
    record(server)
    for _ in range(2):
        page.wait_for_text("even", "#legend-balance")
        page.evaluate("lockstep.store.zoom = [0, 10]")
        page.wait_for("document.getElementById('legend-balance').innerText === ''")
        page.evaluate("lockstep.store.zoom = null")


def test_charts_of_a_trainer_that_names_more_numbers_replace_the_old_ones(page: Browser, server: ServerProcess) -> None:
    server.client.report_trainer_metrics({"kl": 0.1})
    page.wait_for("lockstep.charts.has('trainer-0')")
    page.evaluate("window.old = lockstep.charts.get('trainer-0').plot")
    server.client.report_trainer_metrics({"a-new-name": 0.1})
    page.wait_for("lockstep.charts.get('trainer-0').plot !== window.old")
    assert page.evaluate("uPlot.sync('time').plots.includes(window.old)") is False


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ("seconds(119.7)", "2 min 0 s"),
        ("seconds(119.4)", "1 min 59 s"),
        ("seconds(0.0123)", "12 ms"),
        ("clock(new Date(2026, 0, 1).getTime() / 1000)", "00:00:00"),
        ("precise(0.00213049)", "0.00213"),
        ("bytes(1536)", "1.5 KiB"),
        ("short(15000)", "15k"),
    ],
)
def test_numbers_are_written_as_people_read_them(page: Browser, shown: str, words: str) -> None:
    assert page.evaluate(f"import('./dashboard/files/numbers.js').then((one) => one.{shown})") == words


def test_the_value_under_the_mouse_is_shown(page: Browser) -> None:
    page.wait_for("lockstep.charts.get('kv').places.length > 2")
    hover(page, "kv", "lockstep.charts.get('kv').places[1].at")
    page.wait_for_text("at ", "#legend-kv")
    page.wait_for_text("at ", "#legend-throughput")  # the cursor is that of all charts


def test_charts_follow_the_theme(page: Browser) -> None:
    look = "lockstep.charts.get('throughput').key.split(' ')[0]"
    light = page.evaluate(look)
    page.look(1280, dark=True)
    page.wait_for(f"{look} !== {light!r}")


def test_loads_of_experts_are_drawn_by_expert(page: Browser, server: ServerProcess) -> None:
    server.http.post("/start_expert_distribution_record", json={})
    generate(server)
    page.wait_for("document.querySelectorAll('#chart-experts .f-even').length > 8")
    title = page.evaluate("document.querySelector('#chart-experts title').textContent")
    assert ", expert " in title and "times the mean" in title


def test_the_axis_starts_with_the_server_and_idle_charts_have_no_scale_n31(browser: Browser, model: Path) -> None:
    with ServerProcess(model, **SETTINGS) as server:
        browser.open(f"{server.url}/dashboard")
        browser.wait_for("!document.getElementById('main').hidden")
        started = server.http.get("/dashboard/data").json()["server"]["started_at"]
        axis = browser.evaluate("lockstep.charts.get('throughput').plot.scales.x.min")
        assert axis == pytest.approx(started, abs=0.01)
        chart = "lockstep.charts.get('requests')"
        assert browser.evaluate(f"{chart}.plot.axes[1]._splits.length") == 0, "an idle chart has no scale"
        assert browser.text("#chart-requests .idle") == "idle"


CRAFTED = """
(() => {
  const own = fetch;
  window.fetch = async (...all) => {
    const response = await own(...all), body = await response.json();
    const blank = {reason: "", algorithm: "min_move", num_bytes: 9, num_chunks: 1, chunks_done: 1, seconds: 0.1,
      longest_chunk_s: 0.1, dropped: null, balancedness_before: 0.9, balancedness_after: 0.999,
      balancedness_measured: 0.913, num_local_copies: 0};
    if (all[0].includes("since=0")) {
      const make = (number, age, moved) => ({...blank, number, ended_at: body.now - age, num_experts_moved: moved});
      for (let i = 0; i < 40; i++) body.rebalances.push(make(i + 1, 50 - i / 10, 0));
      for (let i = 0; i < 40; i++) body.rebalances.push(make(i + 41, 40 - i / 10, 2));
      body.rebalances.push(make(81, 8, 5));
      body.server.started_at = window.began ??= body.now - 3600;
    }
    if (body.state) {
      body.state.eplb = {stage: "idle", stuck: null, num_evaluations: 81, reason: ""};
      body.server.started_at = window.began ??= body.now - 3600;
    }
    return {ok: true, status: 200, json: async () => body};
  };
})()
"""


@pytest.fixture
def crafted(browser: Browser, server: ServerProcess) -> Browser:
    """The page of a server that rebalances ten times a second; most changes move no expert."""
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=CRAFTED)
    browser.open(f"{server.url}/dashboard")
    browser.wait_for("!document.getElementById('main').hidden")
    return browser


def test_charts_can_be_read_under_frequent_rebalances_n29(crafted: Browser) -> None:
    """N29: each rebalance was a line over the whole height, also if it moved no expert."""
    groups = "lockstep.charts.get('throughput').marks.find((one) => one.name === 'two').groups"
    assert crafted.evaluate(f"{groups}.map((one) => one.events.length)") == [40, 1]
    middle = f"({groups}[0].first + {groups}[0].last) / 2"
    hover(crafted, "throughput", middle)
    crafted.wait_for_text("40 rebalances, 80 experts moved", "#legend-throughput")
    assert crafted.evaluate("document.querySelectorAll('#rebalances tbody tr').length") == 42
    assert "40 times since" in crafted.text("#rebalances tbody tr:last-child")


def test_what_was_measured_stands_beside_the_prediction_n30(crafted: Browser) -> None:
    row = crafted.text("#rebalances tbody tr").split("\t")
    assert crafted.text("#rebalances thead").split("\t")[1:4] == ["Before", "Predicted after", "Measured after"]
    assert row[1:4] == ["0.900", "0.999", "0.913"]


@pytest.mark.parametrize("width", [360, 390])
def test_tables_are_whole_on_a_phone_n34(browser: Browser, server: ServerProcess, width: int) -> None:
    """N34: they were cut after the third column, and the page was 3200 pixels long."""
    browser.look(width)
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=CRAFTED)
    browser.open(f"{server.url}/dashboard")
    browser.wait_for("!document.getElementById('main').hidden")
    crafted = browser
    crafted.wait_for(f"document.documentElement.clientWidth === {width}")
    assert crafted.evaluate("document.documentElement.scrollHeight") < 2300
    crafted.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    crafted.wait_for("document.getElementById('chart-memory').clientWidth > 0")
    crafted.wait_for("document.documentElement.scrollWidth <= window.innerWidth")
    edges = crafted.evaluate("[...document.querySelectorAll('td')].map((one) => one.getBoundingClientRect().right)")
    assert len(edges) > 100 and max(edges) <= width

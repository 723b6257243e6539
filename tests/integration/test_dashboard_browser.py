"""The dashboard in a real browser, over a real server: what a person sees before, during and after refreshes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save

from tests.chromium import MISSING, PROGRAM, Browser, chromium
from tests.model_zoo import tiny_checkpoint
from tests.ports import free_ports_in_a_row
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.full, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]

HOSTILE = "<img src=x onerror=alert(1)>"
SETTINGS = {"max_total_tokens": 1024, "num_threads": 1, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, enable_return_routed_experts=True, enable_memory_saver=True, **SETTINGS) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as found:
        found.look(1280)
        yield found


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Browser:
    browser.open(f"{server.url}/dashboard")
    browser.wait_for("!document.getElementById('main').hidden")
    return browser


def weights(model: Path, scale: float = 1.0) -> dict[str, torch.Tensor]:
    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        if scale != 1.0 and tensor.dim() == 2:
            tensors[name] = tensor + (scale - 1.0) * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return tensors


def begin(server: ServerProcess, version: str) -> None:
    server.client.begin_weight_update(weight_version=version, update_id=version[:64], lease_s=30.0)


def send(server: ServerProcess, version: str, tensors: dict[str, torch.Tensor]) -> None:
    server.client.update_weights_from_tensor([save(tensors)], format="safetensors", update_id=version[:64])


def generate(server: ServerProcess, **params: Any) -> None:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True} | params}
    server.http.post("/generate", json=body)


def test_an_idle_server_is_shown_without_complaints(page: Browser, server: ServerProcess) -> None:
    page.wait_for_text("live", "#live")
    assert page.text("#gate") == "serving" and "1,024" in page.text("#legend-kv")
    assert "Expert loads are not recorded." in page.text("#chart-loads")
    assert "No text is set" in page.text("#flips") and "No weight update is open." in page.text("#update")
    shown = page.text("#live")
    page.wait_for(f"document.getElementById('live').innerText !== {shown!r}")
    assert page.console == []


def test_a_refresh_is_seen_as_it_comes(page: Browser, server: ServerProcess, model: Path) -> None:
    version = "step-1"
    server.http.post("/start_expert_distribution_record", json={})
    assert server.http.post("/dashboard/route_probe", json={"input_ids": list(range(3, 40))}).status_code == 200
    generate(server)
    tensors = weights(model, 1.5)
    names = sorted(tensors)
    begin(server, version)
    send(server, version, {name: tensors[name] for name in names[:5]})
    page.wait_for_text(version, "#update")
    assert "5 of" in page.text("#update") and "left of 30 s" in page.text("#update")
    assert version not in page.text("#updates")
    send(server, version, {name: tensors[name] for name in names[5:]})
    server.client.end_weight_update(update_id=version)
    page.wait_for_text(version, "#updates")
    assert "committed" in page.text("#updates") and page.text("#tiles").count(version) == 1
    page.wait_for_text("No weight update is open.", "#update")
    page.wait_for_text(version, "#flips")
    (flip,) = server.http.get("/dashboard/data").json()["flips"]
    assert 0 < flip["share"] <= 1 and f"{100 * flip['share']:.2f} %" in page.text("#flips")
    assert page.evaluate("document.querySelectorAll('#chart-loads rect').length") > 0
    assert page.console == []


def test_a_label_that_is_markup_stays_text(page: Browser, server: ServerProcess, model: Path) -> None:
    page.evaluate("window.alert = () => { document.title = 'ALERT'; }")
    begin(server, HOSTILE)
    send(server, HOSTILE, weights(model))
    server.client.end_weight_update(update_id=HOSTILE)
    page.wait_for_text(HOSTILE, "#updates")
    page.wait_for_text(HOSTILE, "#tiles")
    server.http.get(f"/{HOSTILE}")
    page.wait_for_text(HOSTILE, "#errors")
    assert page.evaluate("document.images.length") == 0 and "ALERT" not in page.evaluate("document.title")
    assert page.console == []
    page.evaluate(f"document.body.insertAdjacentHTML('beforeend', {HOSTILE!r})")  # and if it had become markup:
    page.wait_for("document.images.length === 1")
    page.wait_for("new Promise((done) => setTimeout(() => done(true), 300))")
    assert any("Content Security Policy" in line for line in page.console)
    assert "ALERT" not in page.evaluate("document.title")


def test_a_refused_refresh_is_shown_with_its_reason(page: Browser, server: ServerProcess, model: Path) -> None:
    tensors = weights(model)
    name = sorted(tensors)[0]
    begin(server, "bad")
    with pytest.raises(Exception, match="not finite"):
        send(server, "bad", {name: torch.full_like(tensors[name], float("nan"))})
    page.wait_for_text("failed: values that are not finite", "#update")
    page.wait_for_text(f"values that are not finite in {name}", "#errors")
    server.client.abort_weight_update("bad")
    page.wait_for_text("aborted", "#updates")
    assert f"values that are not finite in {name}" in page.text("#updates")
    assert page.console == []


def test_the_page_shows_whether_generation_is_paused(page: Browser, server: ServerProcess) -> None:
    server.http.post("/pause_generation", json={"mode": "in_place"})
    page.wait_for("document.getElementById('gate').innerText === 'paused'")
    assert "paused" in page.text("#gates")
    server.http.post("/continue_generation", json={})
    page.wait_for("document.getElementById('gate').innerText === 'serving'")
    page.wait_for("lockstep.charts.get('requests').pauses.length === 1")


def test_nothing_is_asked_while_the_tab_is_hidden(page: Browser) -> None:
    hide(page, True)
    page.evaluate("window.asked = 0; const own = fetch; window.fetch = (...all) => (window.asked += 1, own(...all));")
    time.sleep(1.5)  # the requests under way
    page.evaluate("window.asked = 0")
    time.sleep(2.5)
    assert page.evaluate("window.asked") == 0
    hide(page, False)
    page.wait_for("window.asked >= 2")


def test_keys_and_the_end_of_the_server(browser: Browser, model: Path) -> None:
    """The page refuses a wrong key, and shows the data with the right one.

    When the server dies the page shows that, and it finds another server at the same address.
    """
    with ServerProcess(model, api_key="user", admin_api_key="boss", **SETTINGS) as first:
        port = first.port
        browser.open(f"{first.url}/dashboard")
        browser.wait_for("!document.getElementById('keys').hidden")
        assert browser.evaluate("document.getElementById('main').hidden")
        for wrong in ("user", HOSTILE, "bo\u00dfs"):
            enter(browser, wrong)
            browser.wait_for("document.getElementById('key-message').innerText !== ''")
            assert browser.evaluate("document.getElementById('main').hidden && document.images.length === 0")
        enter(browser, "boss")
        browser.wait_for("!document.getElementById('main').hidden")
        assert browser.evaluate("document.getElementById('keys').hidden")
        assert (
            browser.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
            == '[{},{},""]'
        )
        first.process.send_signal(signal.SIGKILL)
        first.wait_exit()
        browser.wait_for_text("No answer from the server: it cannot be reached.", "#notice")
        assert browser.text("#live") == "disconnected"
        browser.look(1000)  # drawn anew the page shows the same
        browser.wait_for("document.documentElement.clientWidth === 1000")
        assert browser.text("#gate") == "no answer"
        assert not browser.evaluate("document.getElementById('main').hidden"), "what was known stays"
    with ServerProcess(model, api_key="user", admin_api_key="boss", port=port, **SETTINGS):
        browser.wait_for("document.getElementById('gate').innerText === 'serving'")
        browser.wait_for("document.getElementById('notice').hidden")


def test_an_engine_that_stands_still_is_told(browser: Browser, model: Path) -> None:
    with ServerProcess(model, **SETTINGS) as server:
        browser.open(f"{server.url}/dashboard")
        browser.wait_for("!document.getElementById('main').hidden")
        pid = server.scheduler_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            browser.wait_for_text("The engine does not answer", "#notice")
            assert browser.text("#gate") == "engine does not answer"
        finally:
            os.kill(pid, signal.SIGCONT)
        browser.wait_for("document.getElementById('notice').hidden")


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_is_wider_than_the_window(page: Browser, width: int) -> None:
    page.look(width, dark=width == 800)
    page.wait_for("document.documentElement.scrollWidth <= window.innerWidth")


def enter(browser: Browser, key: str) -> None:
    browser.evaluate(
        f"document.getElementById('key-message').innerText = ''; document.getElementById('key').value = {key!r};"
        "document.getElementById('keys').requestSubmit()"
    )


def hide(page: Browser, hidden: bool) -> None:
    """Hide or show the page, as a browser does with a tab behind another."""
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{value: {str(hidden).lower()}, configurable: true}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


def test_the_endpoints_can_be_read_and_tried_with_a_key_n22(browser: Browser, model: Path) -> None:
    with ServerProcess(model, api_key="user", **SETTINGS) as server:
        browser.open(f"{server.url}/docs")
        for given in ("wrong", "user"):
            browser.wait_for("!document.getElementById('keys').hidden")
            browser.evaluate(
                f"document.getElementById('key').value = {given!r}; document.getElementById('keys').requestSubmit()"
            )
        browser.wait_for("document.querySelectorAll('details').length > 50")
        browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        browser.wait_for_text("return_routed_experts", "main")
        details = "[...document.querySelectorAll('details')]"
        one = f"{details}.find((one) => one.dataset.words.startsWith('get /weight_version'))"
        browser.evaluate(f"{one}.querySelector('.try button').click()")
        answers = "[...document.querySelectorAll('pre')]"
        browser.wait_for(f"{answers}.some((one) => one.innerText.includes('weight_version'))")
        find = "document.getElementById('filter')"
        browser.evaluate(f"{find}.value = 'get /dashboard/data'; {find}.dispatchEvent(new Event('input'))")
        assert browser.evaluate(f"{details}.filter((one) => !one.hidden).length") == 1


# --- charts, samples, buttons ----------------------------------------------------------------------------------------


def hover(page: Browser, chart: str, at: str) -> None:
    """Move the mouse over a chart, to the time of this expression."""
    move(page, "mouseMoved", *place(page, chart, at))


def place(page: Browser, chart: str, at: str) -> tuple[float, float]:
    """Return where on the window a time stands in a chart."""
    found = page.evaluate(
        f"(() => {{ const {{ plot }} = lockstep.charts.get({chart!r}); plot.root.scrollIntoView({{block: 'center'}});"
        f"const box = plot.over.getBoundingClientRect();"
        f"return [box.left + plot.valToPos({at}, 'x'), box.top + box.height / 2]; }})()"
    )
    return found[0], found[1]


def move(page: Browser, kind: str, x: float, y: float) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)


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


def test_the_last_samples_show_which_weights_made_each_token(page: Browser, server: ServerProcess, model: Path) -> None:
    body = {"input_ids": [9, 8, 7], "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}, "rid": "long-one"}
    with server.http.stream("POST", "/generate", json=body | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.client.pause("in_place")
        begin(server, "mid")
        send(server, "mid", weights(model, 1.2))
        server.client.end_weight_update(update_id="mid")
        server.client.continue_generation()
        assert sum(1 for _ in lines) > 1
    page.wait_for("lockstep.store.data.answers.last_sample > 0")
    page.wait_for(
        "(document.querySelector('#samples-bar button')?.click(), document.getElementById('samples').innerText"
        ".includes('long-one'))"
    )
    sample = "[...document.querySelectorAll('.sample')].find((one) => one.innerText.includes('long-one'))"
    assert page.evaluate(f"{sample}.querySelectorAll('.version').length") >= 2
    assert "mid: " in page.evaluate(f"{sample}.querySelector('.versions').textContent")
    classes = f"new Set([...{sample}.querySelectorAll('.tokens span[title]')].map((one) => one.className)).size"
    assert page.evaluate(classes) >= 2
    page.wait_for("lockstep.charts.get('staleness').shown[1].some((value) => value >= 1)")


def test_buttons_act_and_ask_before_what_cannot_be_undone(page: Browser, server: ServerProcess) -> None:
    button = "[...document.querySelectorAll('#actions button')].find((one) => one.innerText.startsWith({!r}))".format
    page.evaluate(f"{button('Pause')}.click()")
    page.wait_for("document.getElementById('gate').innerText === 'paused'")
    page.evaluate(f"{button('Continue')}.click()")
    page.wait_for("document.getElementById('gate').innerText === 'serving'")
    page.evaluate(f"{button('Release')}.click()")
    page.wait_for_text("Stop serving, release KV memory?", "#actions")
    assert server.http.get("/dashboard/data").json()["state"]["memory"]["kv_cache"] == "in_use"
    page.evaluate(f"{button('Stop serving')}.click()")
    page.wait_for("document.getElementById('gate').innerText === 'memory released'")
    page.evaluate(f"{button('Take memory')}.click()")
    page.wait_for("document.getElementById('gate').innerText === 'serving'")


def test_a_refused_action_is_shown_with_its_reason(page: Browser, server: ServerProcess) -> None:
    server.http.post("/stop_expert_distribution_record", json={})
    page.evaluate(
        "import('./dashboard/files/connection.js').then((one) => one.post('stop_expert_distribution_record', {}))"
    )
    page.wait_for_text("is not being recorded", "#notice")


def test_loads_of_experts_are_drawn_by_expert(page: Browser, server: ServerProcess) -> None:
    server.http.post("/start_expert_distribution_record", json={})
    generate(server)
    page.wait_for("document.querySelectorAll('#chart-experts .f-even').length > 8")
    title = page.evaluate("document.querySelector('#chart-experts title').textContent")
    assert ", expert " in title and "times the mean" in title


def test_a_fleet_is_one_page_of_a_process_that_holds_the_key(
    browser: Browser, server: ServerProcess, model: Path
) -> None:
    with ServerProcess(model, api_key="k", **SETTINGS) as two:
        port = free_ports_in_a_row(1)
        command = [sys.executable, "-m", "rollout.cli.main", "dashboard", server.url, two.url, "--port", str(port)]
        process = subprocess.Popen(command, env=os.environ | {"LOCKSTEP_ADMIN_API_KEY": "k"})
        try:
            wait_until_it_listens(port)
            browser.open(f"http://127.0.0.1:{port}/")
            browser.wait_for_text("2 of 2 serve", "#gate")
            assert browser.evaluate("document.querySelectorAll('#engines tbody tr').length") == 2
            browser.wait_for("lockstep.charts.get('rates').shown.length === 2")
            assert '"k"' not in httpx.get(f"http://127.0.0.1:{port}/fleet/data").text
            strange = httpx.get(f"http://127.0.0.1:{port}/fleet/data", headers={"host": "evil.example"})
            assert strange.status_code == 403
            two.process.send_signal(signal.SIGKILL)
            two.wait_exit()
            browser.wait_for_text("1 of 2 serve", "#gate")
            browser.look(360)
            browser.wait_for("document.documentElement.scrollWidth <= window.innerWidth")
            assert browser.console == []
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def wait_until_it_listens(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < until
        time.sleep(0.1)


# --- frequent rebalances ---------------------------------------------------------------------------------------------

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


def test_there_are_no_phantom_rows_and_buttons_ask_for_what_is_missing_n33(browser: Browser, model: Path) -> None:
    with ServerProcess(model, api_key="user", enable_return_routed_experts=True, **SETTINGS) as server:
        browser.open(f"{server.url}/dashboard")
        browser.wait_for("!document.getElementById('keys').hidden")
        enter(browser, "user")
        browser.wait_for("!document.getElementById('main').hidden")
        assert "cuda" not in browser.text("#gates").lower()
        assert browser.evaluate("document.getElementById('card-update').hidden")
        browser.evaluate("document.querySelector('#expert-buttons button').click()")
        browser.wait_for("!document.getElementById('chart-loads').innerText.includes('not recorded')")
        headers = {"Authorization": "Bearer user"}
        assert server.http.get("/dashboard/data", headers=headers).json()["state"]["experts"]["recording"]


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

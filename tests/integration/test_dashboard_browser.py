"""The dashboard in a real browser, over a real server: keys, buttons, and a server that is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.chromium import Browser
from tests.dashboard_browser import NEEDS_BROWSER, SETTINGS, enter, generate
from tests.dashboard_harness import HOSTILE
from tests.server_process import ServerProcess

pytest_plugins = ["tests.dashboard_fixtures"]
pytestmark = [pytest.mark.full, NEEDS_BROWSER]


def test_an_idle_server_is_shown_without_complaints(page: Browser, server: ServerProcess) -> None:
    page.wait_for_text("live", "#live")
    assert page.text("#gate") == "serving" and "1,024" in page.text("#legend-kv")
    assert "Expert loads are not recorded." in page.text("#chart-loads")
    assert "No text is set" in page.text("#flips") and "No weight update is open." in page.text("#update")
    shown = page.text("#live")
    page.wait_for(f"document.getElementById('live').innerText !== {shown!r}")
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


def hide(page: Browser, hidden: bool) -> None:
    """Hide or show the page, as a browser does with a tab behind another."""
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{value: {str(hidden).lower()}, configurable: true}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


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


def test_a_log_probability_that_is_not_finite_does_not_end_the_page(page: Browser, server: ServerProcess) -> None:
    """JSON has null for it."""
    page.evaluate(
        "(() => { const own = fetch; window.fetch = async (...all) => { const answer = await own(...all);"
        "if (!all[0].includes('dashboard/samples')) return answer; const body = await answer.json();"
        "for (const one of body.samples) one.logprobs = [null];"
        "return {ok: true, status: 200, json: async () => body}; }; })()"
    )
    generate(server, max_new_tokens=7)
    page.wait_for("lockstep.store.data.answers.last_sample > 0")
    page.wait_for(
        "(document.querySelector('#samples-bar button')?.click(), document.getElementById('samples').innerText"
        ".includes('+ 7 tokens'))"
    )
    assert page.evaluate("document.getElementById('notice').hidden") and page.console == []


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

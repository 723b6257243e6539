"""Weight updates on the dashboard in a real browser: what a person sees before, during and after refreshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.chromium import Browser
from tests.dashboard_browser import NEEDS_BROWSER, begin, generate, send, weights
from tests.dashboard_harness import HOSTILE
from tests.server_process import ServerProcess

pytest_plugins = ["tests.dashboard_fixtures"]
pytestmark = [pytest.mark.full, NEEDS_BROWSER]


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

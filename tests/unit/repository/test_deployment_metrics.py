"""The dashboards and rules in deploy/ against the names of the server's metrics, and against promtool."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
from pathlib import Path

import pytest

from rollout.http.metrics.metrics import Metrics
from tests.deployment.expressions import DASHBOARDS, Expression, of_dashboard, of_rules, recorded
from tests.deployment.prometheus import FOLDER, MISSING, PROMTOOL

EXPRESSIONS = [*(one for path in DASHBOARDS for one in of_dashboard(path)), *of_rules("record"), *of_rules("alert")]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}


@functools.cache
def served_names() -> frozenset[str]:
    """Return the names of all series that a server may show, and what Prometheus itself adds."""
    families = list(Metrics("m")._registry.collect())
    return frozenset({"up"}) | {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def unknown(expressions: list[Expression]) -> list[str]:
    names = served_names() | recorded()
    return [f"{one.place}: {name}" for one in expressions for name in sorted(one.names() - names)]


def test_every_name_in_deploy_is_one_of_the_server() -> None:
    assert len(EXPRESSIONS) > 70
    assert all(one.names() for one in EXPRESSIONS)
    assert unknown(EXPRESSIONS) == []


def test_a_name_that_no_server_has_is_noticed() -> None:
    for one in EXPRESSIONS:
        name = sorted(one.names())[0]
        wrong = dataclasses.replace(one, text=one.text.replace(name, name + "_x"))
        assert unknown([wrong]), one.place


def test_panels_read_both_families_of_names() -> None:
    """An engine of SGLang or vLLM shows what it has on the same dashboard."""
    (path,) = DASHBOARDS
    for one in of_dashboard(path):
        for side in one.sides():
            families = {name.split(":")[0] for name in Expression(one.place, side).names() if ":" in name}
            assert len(families) <= 1, f"{one.place}: {side}"
    both = [one for one in of_dashboard(path) if len(one.sides()) == 2]
    assert len(both) > 20
    for one in both:
        assert "sglang:" in one.sides()[0] and "vllm:" in one.sides()[1], one.place


def test_panels_have_places_of_their_own() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        cells = [
            (x, y)
            for panel in panels
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
        ids = [panel["id"] for panel in panels]
        assert len(ids) == len(set(ids))


@pytest.mark.skipif(PROMTOOL is None, reason=MISSING)
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "recording.yml", "alerts.yml")],
    ids=["config", "rules"],
)
def test_promtool_accepts_the_files(arguments: tuple[str, ...]) -> None:
    done = promtool(FOLDER, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason=MISSING)
def test_every_alert_fires_when_it_should_and_only_then() -> None:
    text = (FOLDER / "alerts_test.yml").read_text()
    assert {one.place.removeprefix("alert ") for one in of_rules("alert")} == {
        line.split()[1] for line in text.splitlines() if line.strip().startswith("alertname:")
    }
    done = promtool(FOLDER, "test", "rules", "alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason=MISSING)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("== 0", "== 1"), ("lockstep:weights_poisoned == 1", "lockstep:weights_poison == 1"), ("> 0.95", "> 0.999")],
)
def test_a_wrong_alert_is_noticed(tmp_path: Path, right: str, wrong: str) -> None:
    for file in FOLDER.glob("*.yml"):
        text = file.read_text()
        assert file.name != "alerts.yml" or right in text
        (tmp_path / file.name).write_text(text.replace(right, wrong) if file.name == "alerts.yml" else text)
    assert promtool(tmp_path, "test", "rules", "alerts_test.yml").returncode != 0


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)

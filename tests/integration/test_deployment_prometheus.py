"""Every expression of the dashboards and rules in deploy/, evaluated by a real Prometheus over a loaded server."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.expressions import DASHBOARDS, Expression, of_dashboard, of_rules
from tests.deployment.prometheus import MISSING, PROGRAM, Prometheus, prometheus
from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.full, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]

SETTINGS = {
    "tp_size": 2,
    "ep_size": 2,
    "num_threads": 1,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "enable_eplb": True,
    "eplb_rebalance_num_iterations": 20,
    "ep_num_redundant_experts": 2,
    "skip_tokenizer_init": True,
}
WAIT_S = 60.0


class Load(threading.Thread):
    """Requests with sessions, aborts, and refreshes from disk, until `stopped` is set."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.error: Exception | None = None
        self._server, self._folder = server, folder

    def run(self) -> None:
        try:
            turn = 0
            while not self.stopped.is_set():
                turn += 1
                self._ask(turn)
        except Exception as error:
            self.error = error

    def _ask(self, turn: int) -> None:
        prompts = [[7, 3, 9, 4, 1], [7, 3, 9, 4, 2], [5, 6]]
        params = {"max_new_tokens": 8, "ignore_eos": True}
        self._post("/generate", {"input_ids": prompts, "sampling_params": params, "session_id": "s"})
        if turn % 4 == 0:
            rid = f"long-{turn}"
            body = {"input_ids": [1, 2], "rid": rid, "sampling_params": params | {"max_new_tokens": 120}}
            asked = threading.Thread(target=self._post, args=("/generate", body))
            asked.start()
            self._post("/abort_request", {"rid": rid})
            asked.join()
        if turn % 10 == 0:
            self._post("/update_weights_from_disk", {"model_path": str(self._folder), "weight_version": str(turn)})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        answer = self._server.http.post(path, json=body)
        assert answer.status_code == 200, f"{path}: {answer.text}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a busy server for some seconds, and still does."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3)
    with (
        ServerProcess(folder, weight_version="0", **SETTINGS) as server,
        prometheus([server.url.removeprefix("http://")]) as found,
    ):
        assert server.http.post("/start_expert_distribution_record", json={"mode": "stat"}).status_code == 200
        load = Load(server, folder)
        load.start()
        yield found
        load.stopped.set()
        load.join(WAIT_S)
        assert load.error is None, load.error


def without_data(found: Prometheus, expressions: list[Expression], wait_s: float) -> list[str]:
    """Return the sides of expressions that still have no finite value after `wait_s` seconds."""
    left = [Expression(one.place, side) for one in expressions for side in one.sides()]
    deadline = time.monotonic() + wait_s
    while True:
        left = [one for one in left if not any(map(math.isfinite, found.query(one.text)))]
        if not left or time.monotonic() > deadline:
            return [f"{one.place}: {one.text}" for one in left]
        time.sleep(1.0)


def names_of(expressions: list[Expression]) -> list[Expression]:
    return [Expression(one.place, name) for one in expressions for name in sorted(one.names())]


def test_every_expression_has_data_of_a_loaded_server(running: Prometheus) -> None:
    panels = [one for path in DASHBOARDS for one in of_dashboard(path) if " > 0" not in one.text]
    marks = [one for path in DASHBOARDS for one in of_dashboard(path) if " > 0" in one.text]
    assert len(panels) > 60 and len(marks) == 1
    assert without_data(running, [*panels, *of_rules("record"), *names_of(of_rules("alert"))], WAIT_S) == []
    assert without_data(running, marks, WAIT_S) == [], "no commit of weights is marked"
    rules = running.rules()
    assert len(rules) == len(of_rules("record")) + len(of_rules("alert"))
    assert [rule["lastError"] for rule in rules if rule["health"] != "ok"] == []
    fired = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert fired <= {"ManyAborts", "VersionsDiffer"}, "a healthy server raises no alarm"


def test_an_expression_with_a_wrong_name_has_none(running: Prometheus) -> None:
    panels = [one for path in DASHBOARDS for one in of_dashboard(path)]
    assert without_data(running, panels[:1], WAIT_S) == []
    for one in (panels[3], *of_rules("record")[:2]):
        name = sorted(one.names())[0]
        wrong = dataclasses.replace(one, text=one.text.replace(name, name + "_x"))
        assert without_data(running, [wrong], 0.0), one.place
    with pytest.raises(ValueError, match="parse error"):
        running.query("sum(rate(sglang:num_requests_total)")

"""The gauges of the weights in force and the ages of samples, on a live server that is refreshed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from rollout.core.messages.req_output import VersionSpan
from rollout.http.metrics.weights import WeightMetrics
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint

AGE = "lockstep:sample_version_age"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "dense", context_length=256)
    with live_server(folder, engine=EngineThread, max_total_tokens=512, dtype="float32") as server:
        yield server
        assert server.scheduler.error is None


def shown(live: Live) -> dict[str, float]:
    """Return the metrics of the weights, without their labels."""
    lines = [line for line in live.client.get("/metrics").text.splitlines() if line.startswith("lockstep:w")]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_the_gauges_follow_an_update_and_its_label(live: Live) -> None:
    begun = {"lockstep:weight_update_open": 1.0, "lockstep:weights_poisoned": 0.0, "lockstep:withheld": 0.0}
    assert shown(live) == begun | {"lockstep:weight_epoch": 0.0, "lockstep:weight_update_open": 0.0}
    assert live.client.post("/begin_weight_update", json={"weight_version": "7"}).status_code == 200
    assert shown(live) == begun | {"lockstep:weight_epoch": 0.0}
    folder = live.client.get("/model_info").json()["model_path"]
    assert live.client.post("/update_weights_from_disk", json={"model_path": folder}).status_code == 200
    assert live.client.post("/end_weight_update", json={}).status_code == 200
    committed = {
        "lockstep:weight_epoch": 1.0,
        "lockstep:weight_version_number": 7.0,
        "lockstep:weight_update_open": 0.0,
    }
    assert shown(live) == begun | committed


@pytest.mark.parametrize(
    ("spans", "total"),
    [
        ([VersionSpan("a", 0, 4, 3)], 0.0),
        ([VersionSpan("a", 0, 2, 1), VersionSpan("b", 2, 4, 3)], 2.0),
        ([VersionSpan("a", 0, 4, 1)], 2.0),
    ],
    ids=["new", "mixed", "old"],
)
def test_a_sample_is_as_old_as_its_oldest_token(spans: list[VersionSpan], total: float) -> None:
    registry = CollectorRegistry()
    metrics = WeightMetrics("m", registry)
    metrics.on_finished([VersionSpan("c", 0, 1, 3)])
    metrics.on_finished(spans)
    metrics.on_finished([])
    assert registry.get_sample_value(f"{AGE}_count", {"model_name": "m"}) == 2.0
    assert registry.get_sample_value(f"{AGE}_sum", {"model_name": "m"}) == total


def test_the_process_that_serves_is_measured(live: Live) -> None:
    text = live.client.get("/metrics").text
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"):
        (value,) = [float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} ")]
        assert value > 0

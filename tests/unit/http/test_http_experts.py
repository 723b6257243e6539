"""The experts' endpoints over HTTP, on a real engine: bodies, forms of the dump, files, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors import safe_open
from safetensors.numpy import load

from eplb.load_dump import METADATA_KEY
from rollout.http.control import experts as expert_routes
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint

BASE = "expert_distribution_record"
SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_threads": 1}
GAUGES = {
    "sglang:eplb_balancedness", "lockstep:expert_slot_balancedness", "lockstep:expert_load_drift",
    "lockstep:expert_load_drift_by_chance", "lockstep:expert_load_passes",
}  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("http") / "model")
    settings = SETTINGS | {"max_total_tokens": 2048}
    with live_server(folder, with_tokenizer=False, engine=EngineThread, **settings) as server:
        yield server


def generate(live: Live, first: int) -> None:
    live.generate(input_ids=list(range(first, first + 5)), sampling_params={"max_new_tokens": 3, "ignore_eos": True})


def refused(live: Live, body: dict) -> tuple[int, str]:
    """Return the status and the message of a dump that must fail."""
    response = live.client.post(f"/dump_{BASE}", json=body)
    return response.status_code, response.json()["error"]["message"]


def samples(live: Live) -> dict[tuple, float]:
    """Return the values of the recorder's gauges by (name, layer, window)."""
    families = text_string_to_metric_families(live.client.get("/metrics").text)
    return {
        (sample.name, sample.labels.get("layer"), sample.labels.get("window")): sample.value
        for family in families
        for sample in family.samples
        if sample.name in GAUGES
    }


def test_a_record_in_every_form(live: Live, tmp_path: Path) -> None:
    assert live.refused(f"/dump_{BASE}")[0] == 409
    assert samples(live) == {}
    assert live.client.post(f"/start_{BASE}").json()["mode"] == "stat"
    assert live.client.get(f"/start_{BASE}").json()["message"].startswith("Already")
    generate(live, 10)
    text = live.client.post(f"/dump_{BASE}", json={"reset": False}).json()
    assert text["success"] and text["num_passes"] == 3 and np.sum(text["logical_count"]) == 7 * 2 * 3
    reply = live.client.post(f"/dump_{BASE}", json={"format": "safetensors", "reset": False})
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/octet-stream"
    assert load(reply.content)["logical_count"].tolist() == text["logical_count"]
    for name in ("a.json", "a.safetensors"):
        body = {"path": str(tmp_path / name), "reset": False}
        written = live.client.post(f"/dump_{BASE}", json=body).json()
        assert written["path"] == body["path"] and written["num_bytes"] == (tmp_path / name).stat().st_size
        assert refused(live, body)[0] == 409  # it exists
    assert json.loads((tmp_path / "a.json").read_text())["logical_count"] == text["logical_count"]
    with safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        header = json.loads(file.metadata()[METADATA_KEY])
        assert header["model"]["num_experts"] == 8 and header["num_passes"] == 3
        assert file.get_tensor("logical_count").tolist() == text["logical_count"]
    assert live.client.post(f"/stop_{BASE}").json()["num_passes"] == 3
    assert live.refused(f"/stop_{BASE}")[0] == 409
    generate(live, 20)
    assert live.client.get(f"/dump_{BASE}").json()["num_passes"] == 3
    assert live.client.get(f"/dump_{BASE}").json()["num_passes"] == 0


def test_bad_bodies_change_nothing(live: Live, tmp_path: Path) -> None:
    live.client.post(f"/start_{BASE}", json={"mode": None})
    generate(live, 30)
    status, message = live.refused(f"/start_{BASE}", mode="per_layer")
    assert status == 400 and "stat" in message
    for body in (
        {"format": "pt"},
        {"path": str(tmp_path / "x.pt")},
        {"path": str(tmp_path / "x.json"), "format": "safetensors"},
        {"path": str(tmp_path / "no" / "x.json")},
        {"path": str(tmp_path)},
        {"path": "/x\0.json"},
        {"path": ""},
    ):
        assert refused(live, body)[0] == 400, body
    assert not list(tmp_path.iterdir())
    assert live.client.post(f"/dump_{BASE}").json()["num_passes"] == 3
    live.client.post(f"/stop_{BASE}")


def test_without_a_key_a_dump_goes_to_scratch_or_beside_the_model(live: Live, tmp_path: Path) -> None:
    """C11: the folder follows the rule for the folder of /start_profile."""
    outside = Path.home() / "lockstep-test-c11.json"
    linked = tmp_path / "link"
    linked.symlink_to(Path.home())
    hidden = tmp_path / ".cache"
    hidden.mkdir()
    for path in (outside, linked / outside.name, hidden / "x.json", tmp_path / ".x.json"):
        response = live.client.post(f"/dump_{BASE}", json={"path": str(path), "reset": False})
        assert response.status_code == 400 and "--weight-folders" in response.json()["message"], response.text
    assert not outside.exists() and not list(hidden.iterdir())


def test_json_has_a_limit_and_the_record_stays(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live.client.post(f"/start_{BASE}", json={"mode": "per_token"})
    generate(live, 40)
    live.client.post(f"/stop_{BASE}")
    with monkeypatch.context() as patch:
        patch.setattr(expert_routes, "MAX_JSON_NUMBERS", 10)
        for body in ({}, {"path": str(tmp_path / "x.json")}):
            status, message = refused(live, body)
            assert status == 413 and "safetensors" in message
        assert not list(tmp_path.iterdir())
        reply = live.client.post(f"/dump_{BASE}", json={"format": "safetensors"})
    assert load(reply.content)["token_experts"].shape == (7, 2, 3)


def test_metrics_follow_the_record(live: Live) -> None:
    live.client.post(f"/start_{BASE}", json={"mode": "stat"})
    generate(live, 50)
    found = samples(live)
    assert found[("lockstep:expert_load_passes", None, None)] == 3
    for layer in ("1", "2"):
        for window in ("10", "100", "1000"):
            assert found[("sglang:eplb_balancedness", layer, window)] == 1.0
            assert 0 < found[("lockstep:expert_slot_balancedness", layer, window)] < 1
    assert not any(name.startswith("lockstep:expert_load_drift") for name, _, _ in found)
    assert live.client.post("/update_weight_version", json={"new_version": "b"}).status_code == 200
    internal = live.client.get("/server_info").json()["internal_states"][0]
    assert internal["expert_distribution"]["recording"] and internal["expert_distribution"]["num_passes"] == 3
    live.client.post(f"/stop_{BASE}")


def test_the_location_over_http(live: Live) -> None:
    located = live.client.get("/expert_location").json()
    assert located["physical_to_logical_map"] == [list(range(8))] * 2
    assert located["placement_epoch"] == 0 and located["moe_layer_ids"] == [1, 2]


def test_the_admin_key_guards_the_recorder(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    settings = SETTINGS | {"max_total_tokens": 512}
    keys: dict[str, Any] = {"api_key": "user", "admin_api_key": "admin"}
    with live_server(folder, with_tokenizer=False, engine=EngineThread, **settings, **keys) as server:
        for path, method in ((f"/start_{BASE}", "POST"), (f"/dump_{BASE}", "GET"), ("/expert_location", "GET")):
            status = {
                key: server.client.request(method, path, headers={"authorization": f"Bearer {key}"}).status_code
                for key in ("user", "admin")
            }
            assert status == {"user": 401, "admin": 200}


def test_a_rebalance_over_http_says_why_not(live: Live) -> None:
    """One rank has nothing to balance; `test_parallel_eplb` tests the answers of several ranks."""
    response = live.client.post("/eplb_rebalance", json={"dry_run": True})
    assert response.status_code == 400
    assert response.json()["message"] == "all experts are on one rank (--ep-size 1): there is nothing to rebalance"
    for wrong in ({"layers_per_chunk": 0}, {"max_stall_s": -1}, {"physical_to_logical_map": [[0.5]]}):
        assert live.client.post("/eplb_rebalance", json=wrong).status_code == 400
    assert "lockstep:eplb_" not in "".join(f"{name}{value}" for (name, *_), value in samples(live).items())
    assert live.client.get("/health_generate").status_code == 200

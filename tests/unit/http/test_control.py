"""Control and info endpoints: replies, refusals, deadlines, keys."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.messages import io_struct
from rollout.core.messages import weights as weight_io_struct
from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.message import ControlReqInput
from rollout.http.native import info as info_routes
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Live]:
    with live_server(folder, weight_version="start", dtype="float32") as server:
        yield server


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    shared.scheduler.received.clear()
    yield shared
    shared.scheduler.answers.clear()
    shared.client.post("/continue_generation")


def refusing(status: int, message: str) -> Any:
    def answer(verb: ControlReqInput) -> ControlReqOutput:
        return ControlReqOutput(
            request_id=verb.request_id, success=False, message=message, status_code=status, error_type="Conflict"
        )

    return answer


def giving(data: dict[str, Any], message: str = "done") -> Any:
    def answer(verb: ControlReqInput) -> ControlReqOutput:
        return ControlReqOutput(request_id=verb.request_id, success=True, message=message, data=data)

    return answer


@pytest.mark.parametrize("body", [None, b"", b"{}", b'{"mode": null}', b'{"mode": "abort", "extra": 1}'])
def test_pause_and_continue_take_any_body_and_say_what_happened(live: Live, body: bytes | None) -> None:
    assert live.client.get("/ready").status_code == 200
    reply = live.client.post("/pause_generation", content=body)
    assert reply.status_code == 200
    counts = {"num_running": 0, "num_waiting": 0, "num_aborted": 0}
    ignored = {"ignored_fields": ["extra"]} if body is not None and b"extra" in body else {}
    assert reply.json() == {
        "message": "done", "status": "ok", "success": True, "paused": True, "mode": "abort", **counts, **ignored,
    }  # fmt: skip
    assert live.sent(io_struct.PauseGenerationReqInput)[0].mode == "abort"
    assert live.client.get("/ready").status_code == 503
    assert live.client.get("/health").status_code == 200
    assert live.client.get("/health_generate").status_code == 200
    assert live.client.get("/ping").status_code == 200
    reply = live.client.post("/continue_generation", content=b'{"torch_empty_cache": true}')
    assert reply.json()["paused"] is False
    assert live.client.get("/ready").status_code == 200


def test_requests_wait_while_paused(live: Live) -> None:
    live.client.post("/pause_generation", json={"mode": "retract"})
    box: list[Any] = []
    thread = threading.Thread(
        target=lambda: box.append(live.generate(input_ids=[1], sampling_params={"max_new_tokens": 1}))
    )
    thread.start()
    live.wait_until(lambda: live.manager.num_in_flight == 1)
    live.client.post("/continue_generation")
    thread.join()
    assert box[0]["output_ids"] == [1]


def test_flush_cache_is_text_by_get_and_post(live: Live) -> None:
    for method in ("GET", "POST"):
        reply = live.client.request(method, "/flush_cache")
        assert (reply.status_code, reply.text) == (200, "Cache flushed.\n")
        assert reply.headers["content-type"].startswith("text/plain")
    live.scheduler.answers[io_struct.FlushCacheReqInput] = refusing(400, "1 running")
    reply = live.client.post("/flush_cache")
    assert (reply.status_code, reply.text) == (400, "1 running\n")
    live.scheduler.received.clear()
    reply = live.client.get("/flush_cache", params={"timeout": 0.2})
    assert reply.status_code == 400 and reply.text.startswith("Timed out waiting for idle state.")
    assert len(live.sent(io_struct.FlushCacheReqInput)) > 1
    assert live.client.get("/flush_cache", params={"timeout": "soon"}).json()["success"] is False


def test_weight_verbs_reach_the_scheduler_as_sent(live: Live) -> None:
    calls: list[tuple[str, dict[str, Any], type, dict[str, Any]]] = [
        (
            "init_weights_update_group",
            {"master_address": "localhost", "master_port": "12345", "rank_offset": 1, "world_size": 2, "pp_rank": 0},
            weight_io_struct.InitWeightsUpdateGroupReqInput,
            {"master_port": 12345, "group_name": "weight_update_group", "backend": None},
        ),
        ("destroy_weights_update_group", {"group_name": "g"}, weight_io_struct.DestroyWeightsUpdateGroupReqInput, {}),
        (
            "begin_weight_update",
            {"selector": "draft", "manifest": [{"name": "w", "dtype": "float32", "shape": [2, 3]}]},
            weight_io_struct.BeginWeightUpdateReqInput,
            {"coverage": "full", "weight_version": None, "selector": "draft"},
        ),
        (
            "end_weight_update",
            {"phase": "verify"},
            weight_io_struct.EndWeightUpdateReqInput,
            {"phase": "verify"},
        ),
        ("abort_weight_update", {}, weight_io_struct.AbortWeightUpdateReqInput, {}),
        ("drop_weight_snapshot", {}, weight_io_struct.DropWeightSnapshotReqInput, {}),
        (
            "update_weights_from_distributed",
            {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "load_format": "flattened_bucket"},
            weight_io_struct.UpdateWeightsFromDistributedReqInput,
            {"abort_all_requests": False, "weight_version": None},
        ),
        (
            "update_weight_version",
            {"new_version": "7", "abort_all_requests": False},
            weight_io_struct.UpdateWeightVersionReqInput,
            {"new_version": "7", "abort_all_requests": False},
        ),
    ]
    for path, body, verb, expected in calls:
        reply = live.client.post(f"/{path}", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["success"] is True and reply.json()["message"] == "done"
        [message] = live.sent(verb)
        assert {name: getattr(message, name) for name in expected} == expected
    assert reply.json()["new_version"] == "7"
    (entry,) = live.sent(weight_io_struct.BeginWeightUpdateReqInput)[0].entries()
    assert entry.shape == [2, 3]
    (bucket,) = live.sent(weight_io_struct.UpdateWeightsFromDistributedReqInput)
    assert bucket.lists() == (["w"], ["bfloat16"], [[2, 3]], None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pause_generation", {"mode": "sleep"}),
        ("init_weights_update_group", {}),
        ("init_weights_update_group", {"master_address": "x", "master_port": 99999, "rank_offset": 0, "world_size": 1}),
        ("begin_weight_update", {"coverage": "some"}),
        ("begin_weight_update", {"selector": "drafts"}),
        ("begin_weight_update", {"target": {"draft": "some"}}),
        ("begin_weight_update", {"manifest": [{"name": "w", "dtype": "float32", "shape": [-1]}]}),
        ("end_weight_update", {"phase": "half"}),
        ("abort_weight_update", {"update_id": ""}),
        ("abort_weight_update", {"update_id": "u" * 65}),
        ("update_weight_version", {"new_version": ""}),
        ("get_weights_by_name", {}),
        ("weights_checker", {"action": "forget"}),
        ("weight_checker", {}),
        ("weight_checker", {"action": "snapshot"}),
        ("weight_checker", {"action": "compare", "baseline": {"w": 7}}),
    ],
)
def test_bad_control_bodies_are_refused_before_the_scheduler(live: Live, path: str, body: dict[str, Any]) -> None:
    reply = live.client.post(f"/{path}", json=body)
    content = reply.json()
    assert reply.status_code == 400
    assert content["success"] is False and content["message"]
    assert content["error"] == {"type": "BadRequest", "message": content["message"]}
    assert live.scheduler.received == []


@pytest.mark.parametrize(
    ("body", "group"),
    [
        ({"group_name": "g", "names": "w"}, "g"),
        ({"group_name": "g", "names": [], "dtypes": [], "shapes": [[-1]]}, "g"),
        ({"names": []}, "weight_update_group"),
        ({"group_name": 7}, None),
        (b"{", None),
    ],
)
def test_w17_a_bucket_that_cannot_be_read_is_refused_by_the_scheduler_too(live: Live, body: Any, group: Any) -> None:
    """The scheduler has to leave the group, as the broadcast may be on its way."""
    fields = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = live.client.post("/update_weights_from_distributed", **fields)
    assert reply.status_code == 400
    [message] = live.sent(weight_io_struct.RefusedBucketReqInput)
    assert message.group_name == group and message.reason == reply.json()["message"]


def test_engine_18_routes_to_follow_are_refused(live: Live) -> None:
    """A server that does not follow them refuses them: a score that ignores them would be wrong in silence."""
    for path, body in (("generate", {"text": "a"}), ("v1/completions", {"prompt": "a"})):
        reply = live.client.post(f"/{path}", json=body | {"replay_routed_experts": "AAAA"})
        assert reply.status_code == 400 and "replay_routed_experts" in reply.json()["error"]["message"]


def test_a_refusal_keeps_its_status_type_and_message(live: Live) -> None:
    live.scheduler.answers[weight_io_struct.EndWeightUpdateReqInput] = refusing(409, "no update is open")
    reply = live.client.post("/end_weight_update")
    assert reply.status_code == 409
    assert reply.json() == {
        "success": False,
        "message": "no update is open",
        "error": {"type": "Conflict", "message": "no update is open"},
    }
    live.scheduler.answers[io_struct.PauseGenerationReqInput] = refusing(409, "no")
    assert live.client.post("/pause_generation").status_code == 409
    assert live.client.get("/ready").status_code == 200


def test_no_answer_in_time_is_504_and_the_late_answer_is_dropped(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[ControlReqInput] = []
    live.scheduler.answers[io_struct.PauseGenerationReqInput] = late.append
    verb = io_struct.PauseGenerationReqInput
    monkeypatch.setattr(verb, "endpoint", dataclasses.replace(verb.endpoint, timeout_s=0.1))
    reply = live.client.post("/pause_generation")
    assert reply.status_code == 504
    assert reply.json()["error"]["type"] == "SchedulerTimeout"
    assert live.manager.communicator.num_waiting == 0
    live.scheduler._send(ControlReqOutput(request_id=late[0].request_id, success=True))
    assert live.client.get("/health").status_code == 200


def test_health_names_the_start_of_the_server_c8(live: Live) -> None:
    """C8: the start shows a restart of any length."""
    health = live.client.get("/health")
    assert health.content == b"" and len(health.headers["x-start-id"]) == 32
    assert health.headers["x-start-id"] == live.manager.start_id == live.client.get("/server_info").json()["start_id"]


def test_a_scheduler_that_says_nothing_is_not_healthy(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.scheduler.answers[io_struct.GetStateReqInput] = lambda verb: None
    verb = io_struct.GetStateReqInput
    monkeypatch.setattr(verb, "endpoint", dataclasses.replace(verb.endpoint, timeout_s=0.1))
    monkeypatch.setattr(info_routes, "HEALTH_STATE_S", 0.1)
    assert live.client.get("/health").status_code == 503
    metrics = live.client.get("/metrics")
    assert metrics.status_code == 200 and "lockstep:state_age_seconds" in metrics.text


def test_get_weights_and_checksums(live: Live) -> None:
    live.scheduler.answers[weight_io_struct.GetWeightsByNameReqInput] = giving({"parameter": [[1.0]], "staged": False})
    assert live.client.post("/get_weights_by_name", json={"name": "w"}).json() == [[1.0]]
    assert live.client.get("/get_weights_by_name", params={"name": "w", "truncate_size": 3}).json() == [[1.0]]
    assert [m.truncate_size for m in live.sent(weight_io_struct.GetWeightsByNameReqInput)] == [100, 3]
    assert live.client.get("/get_weights_by_name").status_code == 400
    live.scheduler.answers[weight_io_struct.WeightsCheckerReqInput] = giving({"checksums": {"w": "ab"}, "digest": "cd"})
    reply = live.client.post("/weights_checker").json()
    assert reply["success"] is True and reply["per_engine_checksum"] == "cd"
    assert reply["ranks"][0]["checksums"] == {"w": "ab"}


def test_the_actions_of_the_weight_checker(live: Live) -> None:
    """A comparison that finds a difference is a failure for clients that only look at the status."""
    verb = weight_io_struct.WeightsCheckerReqInput
    live.scheduler.answers[verb] = giving({"num_tensors": 3, "num_bytes": 12, "digest": "cd", "weight_version": "v1"})
    body = {"action": "snapshot", "keep_content": True, "allow_quant_error": True, "selector": "all"}
    assert live.client.post("/weights_checker", json=body).json()["num_bytes"] == 12
    difference = {"name": "w", "num_elements": 1, "max_abs_difference": None}
    for differing, status in (([], 200), ([difference], 409)):
        live.scheduler.answers[verb] = giving({"equal": not differing, "differing": differing, "num_compared": 3})
        reply = live.client.post("/weights_checker", json={"action": "compare", "skip_tensor_list": ["x"]})
        assert reply.status_code == status
        assert reply.json()["success"] is (status == 200) and reply.json()["differing"] == differing
    assert reply.json()["error"]["type"] == "WeightsDiffer"
    live.scheduler.answers[verb] = refusing(409, "a weight update is open")
    assert live.client.post("/weights_checker", json={"action": "reset_tensors"}).status_code == 409
    sent = live.sent(verb)
    assert [message.action for message in sent] == ["snapshot", "compare", "compare", "reset_tensors"]
    assert sent[0].keep_content and sent[1].skip_tensor_list == ["x"]


def test_info_is_what_external_engine_clients_compare(live: Live) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = live.client.get(path).json()
        expected = {
            "host": "127.0.0.1", "port": 30000, "nnodes": 1, "node_rank": 0, "gpu_id_step": 1, "base_gpu_id": 0,
            "tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1, "moe_dp_size": 1, "num_gpus": 1,
            "disaggregation_mode": "null", "enable_memory_saver": False, "enable_return_routed_experts": False,
            "dtype": "float32", "weight_version": "v0", "batch_invariant": True, "batch_invariance_note": "",
        }  # fmt: skip
        assert {key: info[key] for key in expected} == expected
        assert info["scheduler_info"]["max_req_input_len"] == 159
        assert info["internal_states"][0]["memory_usage"]["weight"] == 1.0
        assert "--weight-version start" in info["launch_command"]
    for path in ("/model_info", "/get_model_info"):
        model = live.client.get(path).json()
        assert (model["served_model_name"], model["weight_version"], model["is_generation"]) == ("tiny", "v0", True)
        assert model["architectures"] == ["Qwen3MoeForCausalLM"]
    for path in ("/weight_version", "/get_weight_version"):
        assert live.client.get(path).json()["weight_version"] == "v0"
    [load] = live.client.get("/get_load").json()
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_reqs"]) == (0, 0, 0)
    loads = live.client.get("/v1/loads", params={"include": "core"}).json()
    assert loads["loads"][0]["max_total_num_tokens"] == 200


def test_metrics_count_requests_and_their_tokens(live: Live) -> None:
    def value(name: str) -> float:
        for line in live.client.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{{"):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(name)

    before = value("sglang:generation_tokens_total")
    live.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 5})
    assert value("sglang:generation_tokens_total") == before + 5
    assert value("sglang:token_usage") == 0.05
    assert value("sglang:e2e_request_latency_seconds_count") == value("sglang:num_requests_total")
    assert value("sglang:time_to_first_token_seconds_count") >= 1


def test_unknown_paths_and_methods_have_the_one_shape(live: Live) -> None:
    for reply in (live.client.get("/nowhere"), live.client.get("/generate")):
        assert reply.status_code in (404, 405)
        assert set(reply.json()["error"]) == {"type", "message"}


@pytest.mark.filterwarnings("error")  # FastAPI warns of two operations with one id
def test_openapi_shows_every_body(live: Live) -> None:
    paths = live.client.get("/openapi.json").json()["paths"]
    schema = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"text", "input_ids", "sampling_params", "return_routed_experts"} <= set(schema["properties"])
    assert "$ref" not in str(paths["/begin_weight_update"])
    assert live.client.get("/docs").status_code == 200


def test_each_route_requires_the_right_key(folder: Path) -> None:
    with live_server(folder, api_key="user", admin_api_key="boss") as live:

        def status(method: str, path: str, key: str | None = None, **arguments: Any) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return live.client.request(method, path, headers=headers, **arguments).status_code

        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        for path in ("/health", "/health_generate", "/ready", "/ping", "/metrics"):
            assert status("GET", path) == 200
        for key, expected in ((None, 401), ("use", 401), ("userx", 401), ("boss", 401), ("usér", 401), ("user", 200)):
            headers = {} if key is None else {b"authorization": b"Bearer " + key.encode()}
            assert live.client.post("/generate", json=body, headers=headers).status_code == expected  # type: ignore[arg-type]
            assert status("GET", "/server_info", None if key == "usér" else key) == expected
        for key, expected in ((None, 401), ("user", 401), ("boss", 200)):
            assert status("POST", "/pause_generation", key) == expected
            assert status("GET", "/flush_cache", key) == expected
        for path in ("/openapi.json", "/docs", "/nowhere"):
            assert status("GET", path) == 401
        reply = live.client.post("/generate", json=body, headers={"authorization": "Basic user"})
        assert reply.status_code == 401
        assert set(reply.json()["error"]) == {"type", "message"}
        text = live.client.get("/server_info", headers={"authorization": "Bearer user"}).text
        assert "user" not in text.replace("user_", "") and "boss" not in text


def test_one_key_covers_control_endpoints_too(folder: Path) -> None:
    with live_server(folder, api_key="user") as live:
        assert live.client.post("/pause_generation").status_code == 401
        assert live.client.post("/pause_generation", headers={"authorization": "Bearer user"}).status_code == 200


@pytest.mark.parametrize(
    ("dense", "captures", "message"), [(True, False, "dense"), (False, False, "--enable-return-routed-experts")]
)
def test_routes_that_cannot_be_had_are_400(tmp_path: Path, dense: bool, captures: bool, message: str) -> None:
    with live_server(write_model_folder(tmp_path, dense=dense), captures=captures) as live:
        status, said = live.refused(input_ids=[1], return_routed_experts=True)
        assert status == 400 and message in said
        live.generate(input_ids=[1], return_routed_experts=False)


def test_routed_experts_are_returned_by_default_where_set(folder: Path) -> None:
    with live_server(folder, return_routed_experts_by_default=True) as live:
        assert "routed_experts" in live.generate(input_ids=[1, 2])["meta_info"]
        assert "routed_experts" not in live.generate(input_ids=[1, 2], return_routed_experts=False)["meta_info"]
        assert live.client.get("/server_info").json()["enable_return_routed_experts"] is True


def test_a_server_without_a_tokenizer_takes_and_gives_ids(folder: Path) -> None:
    with live_server(folder, with_tokenizer=False, skip_tokenizer_init=True) as live:
        reply = live.generate(input_ids=[1, 2], return_logprob=True, return_text_in_logprobs=True)
        assert "text" not in reply and reply["meta_info"]["output_token_logprobs"][0][2] is None
        for body in ({"text": "a"}, {"input_ids": [1], "sampling_params": {"stop": "x"}}):
            status, message = live.refused(**body)
            assert status == 400 and "skip-tokenizer-init" in message
        assert live.refused("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])[0] == 400
        reply = live.client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2, "logprobs": 0})
        assert reply.json()["choices"][0]["logprobs"]["tokens"] == ["token_id:1", "token_id:2"]


def test_when_the_scheduler_is_gone_everything_fails_with_the_reason(folder: Path) -> None:
    with live_server(folder) as live:
        box: list[Any] = []
        body = {"input_ids": [1], "extra_key": "hold"}
        thread = threading.Thread(target=lambda: box.append(live.client.post("/generate", json=body)))
        thread.start()
        live.wait_until(lambda: live.manager.num_in_flight == 1)
        with live.client.stream("POST", "/generate", json=body | {"stream": True}) as response:
            live.call_in_loop(lambda: live.manager.fail("the scheduler process ended"))
            text = response.read().decode()
        thread.join()
        assert box[0].status_code == 503
        assert box[0].json()["error"]["message"] == "the scheduler process ended"
        assert '"retryable":true' in text and text.endswith("data: [DONE]\n\n")
        assert live.refused(input_ids=[1]) == (503, "the scheduler process ended")
        for path in ("/health", "/ready", "/ping"):
            assert live.client.get(path).status_code == 503
        assert live.client.post("/flush_cache").status_code == 503

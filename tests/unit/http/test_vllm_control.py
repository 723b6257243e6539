"""vLLM's control and weight endpoints over the stand-in: which verbs they send, what they reply and refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.core.messages import io_struct
from rollout.core.messages import weights as weight_io_struct
from rollout.core.messages.adapters import UnloadLoraAdapterReqInput
from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.message import ControlReqInput, NoReply
from rollout.http.vllm import weight_routes as vllm_weight_routes
from rollout.tokenizer_manager.communicator import merge_answers
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder
from weight_sync.bucket import cut_packed
from weight_sync.tensor_meta import parse_metas

GROUP = {"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2}
TENSORS = {"names": ["a", "b"], "dtype_names": ["float32", "torch.bfloat16"], "shapes": [[4], [2, 3]]}
AWAKE = {"weights": "in_use", "kv_cache": "in_use", "cuda_graph": "in_use"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    with live_server(folder, enable_memory_saver=True, enable_weights_cpu_backup=True) as server:
        yield server


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    shared.client.post("/init_weight_transfer_engine", json={"init_info": GROUP})
    shared.scheduler.received.clear()
    yield shared
    shared.scheduler.answers.clear()
    shared.client.post("/finish_weight_update")
    shared.client.post("/resume")


def refusing(status: int) -> Any:
    def answer(verb: ControlReqInput) -> ControlReqOutput:
        return ControlReqOutput(request_id=verb.request_id, success=False, message="no", status_code=status)

    return answer


def state(live: Live, **facts: Any) -> None:
    """Add `facts` to the state that the scheduler reports from now on."""
    known = live.scheduler._state() | {"memory": AWAKE}

    def answer(verb: ControlReqInput) -> ControlReqOutput:
        return ControlReqOutput(request_id=verb.request_id, success=True, data=known | facts)

    live.scheduler.answers[io_struct.GetStateReqInput] = answer


def verbs(live: Live) -> list[str]:
    """Return the names of the control verbs that reached the scheduler, apart from looks at its state."""
    names = [type(item).__name__.removesuffix("ReqInput") for item in live.scheduler.received]
    return [name for name in names if name not in ("GetState", "GetWeightUpdate")]


@pytest.mark.parametrize(
    ("query", "mode", "flushes"),
    [
        ({}, "abort", True),
        ({"mode": "keep"}, "in_place", False),
        ({"mode": "keep", "clear_cache": "false"}, "in_place", False),
        ({"mode": "wait", "clear_cache": "false"}, "wait", False),
        ({"mode": "abort", "clear_cache": "true"}, "abort", True),
        ({"wait_for_inflight_requests": "true"}, "wait", True),
    ],
)
def test_pause_and_resume_send_their_verbs(live: Live, query: dict[str, str], mode: str, flushes: bool) -> None:
    reply = live.client.post("/pause", params=query)
    assert reply.status_code == 200 and reply.json()["status"] == "paused"
    assert live.sent(io_struct.PauseGenerationReqInput)[0].mode == mode
    assert verbs(live)[1:] == ["FlushCache"] * flushes
    assert live.client.get("/is_paused").json() == {"is_paused": True}
    assert live.client.post("/resume").json()["status"] == "resumed"
    assert live.client.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize(
    "path",
    [
        *("/pause?mode=freeze", "/pause?clear_cache=perhaps", "/sleep?level=3", "/sleep?level=x", "/sleep?mode=now"),
        *("/sleep?tags=cuda_graph", "/wake_up?tags=gpu"),
    ],
)
def test_what_cannot_be_meant_changes_nothing(live: Live, path: str) -> None:
    reply = live.client.post(path)
    assert reply.status_code == 400 and reply.json()["success"] is False
    assert not verbs(live)


def test_abort_some_or_all(live: Live) -> None:
    box: list[Any] = []

    def run(rid: str) -> None:
        box.append(live.generate(rid=rid, input_ids=[1], extra_key="hold", sampling_params={"max_new_tokens": 5}))

    for rid in ("one", "two", "three"):
        threading.Thread(target=run, args=(rid,)).start()
    live.wait_until(lambda: live.manager.num_in_flight == 3)
    nobody = live.client.post("/abort_requests", json={"request_ids": []})
    assert nobody.json() == {"status": "aborted", "aborted": 0}, "C9: a computed list that is empty"
    assert live.client.post("/abort_request", json={"rid": []}).status_code == 200
    assert live.client.post("/abort_request", json={"rid": ""}).status_code == 200
    time.sleep(0.1)
    assert live.manager.num_in_flight == 3 and not box
    assert live.client.post("/abort_requests", json={"request_ids": ["one"]}).json() == {
        "status": "aborted", "aborted": 1,
    }  # fmt: skip
    live.wait_until(lambda: len(box) == 1)
    assert live.client.post("/abort_requests", json={"request_ids": None}).json()["aborted"] == 2
    live.wait_until(lambda: len(box) == 3)
    assert {item["meta_info"]["finish_reason"]["type"] for item in box} == {"abort"}
    assert not live.client.get("/is_paused").json()["is_paused"]


@pytest.mark.parametrize(
    ("query", "mode", "tags"),
    [
        ({}, "abort", ["weights", "kv_cache"]),
        ({"level": 2, "mode": "keep"}, "retract", ["weights", "kv_cache"]),
        ({"level": 1, "mode": "wait", "tags": "kv_cache"}, "wait", ["kv_cache"]),
        ({"level": 0, "mode": "keep"}, "in_place", None),
    ],
)
def test_sleep_pauses_and_releases_memory_by_level(
    live: Live, query: dict[str, Any], mode: str, tags: list[str] | None
) -> None:
    state(live)
    reply = live.client.post("/sleep", params=query)
    assert reply.status_code == 200 and reply.json()["status"] == "sleeping"
    assert reply.json()["level"] == query.get("level", 1)
    assert live.sent(io_struct.PauseGenerationReqInput)[0].mode == mode
    released = live.sent(io_struct.ReleaseMemoryOccupationReqInput)
    assert [verb.tags for verb in released] == ([] if tags is None else [tags])


def test_who_sleeps_sleeps_on_and_who_is_awake_stays_awake(live: Live) -> None:
    state(live, memory=AWAKE | {"weights": "released"})
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert live.client.post("/sleep").status_code == 200
    assert live.sent(io_struct.ReleaseMemoryOccupationReqInput)[0].tags == ["kv_cache"]
    live.scheduler.received.clear()
    reply = live.client.post("/wake_up", params={"tags": ["kv_cache"]})
    assert reply.json() == {"status": "sleeping", "tags": ["kv_cache"]} and verbs(live) == []
    reply = live.client.post("/wake_up", params={"tags": ["weights", "kv_cache"]})
    assert reply.json()["status"] == "awake" and verbs(live) == ["ResumeMemoryOccupation", "ContinueGeneration"]
    state(live)
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": False}
    live.scheduler.received.clear()
    assert live.client.post("/wake_up").json()["status"] == "awake" and verbs(live) == ["ContinueGeneration"]


def test_a_sleep_that_is_refused_leaves_no_pause(live: Live) -> None:
    state(live)
    live.scheduler.answers[io_struct.ReleaseMemoryOccupationReqInput] = refusing(409)
    reply = live.client.post("/sleep")
    assert reply.status_code == 409 and reply.json()["message"] == "no"
    assert verbs(live) == ["PauseGeneration", "ReleaseMemoryOccupation", "ContinueGeneration"]
    state(live, paused=True)
    live.scheduler.received.clear()
    assert live.client.post("/sleep").status_code == 409 and verbs(live)[-1] == "ReleaseMemoryOccupation"


def test_sleep_says_which_flags_it_needs(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    with live_server(folder) as live:
        assert "--enable-memory-saver" in live.client.post("/sleep").json()["message"]
        assert live.client.post("/sleep?level=0").status_code == 200
    with live_server(folder, enable_memory_saver=True) as live:
        state(live)
        assert "--enable-weights-cpu-backup" in live.client.post("/sleep").json()["message"]
        assert not verbs(live)
        assert live.client.post("/sleep?tags=kv_cache").status_code == 200
        assert live.client.post("/sleep?level=2").status_code == 200


@pytest.mark.parametrize("where", ["params", "json"])
def test_reset_prefix_cache_flushes_the_cache(live: Live, where: str) -> None:
    reply = live.client.post("/reset_prefix_cache", **{where: {"reset_running_requests": True}})
    assert reply.json()["success"] is True
    assert live.client.post("/reset_prefix_cache").json()["success"] is True
    assert [verb.retract for verb in live.sent(io_struct.FlushCacheReqInput)] == [True, False]
    live.scheduler.answers[io_struct.FlushCacheReqInput] = refusing(400)
    reply = live.client.post("/reset_prefix_cache")
    assert (reply.status_code, reply.json()["success"]) == (200, False)


def test_what_clients_ask_of_the_server(live: Live) -> None:
    assert live.client.get("/get_world_size").json() == {"world_size": 1}
    assert live.client.get("/get_world_size", params={"include_dp": "false"}).json() == {"world_size": 1}
    config = live.client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["weight_transfer_config"] is not None and config["lora_config"] is None
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert "vllm_config" not in live.client.get("/server_info").json()
    assert live.client.get("/server_info", params={"config_format": "yaml"}).status_code == 400


# --- weights -----------------------------------------------------------------------------------------------------


def test_an_update_is_one_transaction_under_an_id_of_its_own(live: Live) -> None:
    assert live.client.post("/start_weight_update", json={"is_checkpoint_format": True}).status_code == 200
    assert live.client.post("/update_weights", json={"update_info": TENSORS}).status_code == 200
    assert live.client.post("/finish_weight_update", json={"weight_version": "7"}).status_code == 200
    begin, bucket, end = live.scheduler.received
    assert begin.coverage == "partial" and begin.update_id == bucket.update_id == end.update_id
    assert bucket.lists() == (["a", "b"], ["float32", "torch.bfloat16"], [[4], [2, 3]], None)
    assert (bucket.group_name, bucket.load_format) == ("weight_update_group", None)
    assert end.weight_version == "7"
    refused = live.client.post("/finish_weight_update")
    assert refused.status_code == 409 and "/start_weight_update" in refused.json()["message"]
    assert live.client.post("/start_weight_update").status_code == 200
    assert live.scheduler.received[-1].update_id != begin.update_id


def test_an_update_of_the_draft_has_the_same_phases(live: Live) -> None:
    assert live.client.post("/start_draft_weight_update", json={"is_checkpoint_format": True}).status_code == 200
    assert live.client.post("/update_weights", json={"update_info": TENSORS}).status_code == 200
    assert live.client.post("/finish_weight_update", json={"weight_version": "7"}).status_code == 200
    begin, bucket, end = live.scheduler.received
    assert begin.target.draft and (begin.coverage, begin.counts_tensors) == ("full", False)
    assert begin.update_id == bucket.update_id == end.update_id and end.weight_version == "7"
    rpc = {"method": "start_draft_weight_update", "kwargs": {"is_checkpoint_format": True}}
    assert live.client.post("/collective_rpc", json=rpc).status_code == 200
    assert live.scheduler.received[-1].target.draft


def test_packed_buffers_come_as_one_bucket_with_their_size(live: Live) -> None:
    info = {"names": list("abcde"), "dtype_names": ["float32"] * 5, "shapes": [[2], [1], [3], [9], [1]]}
    joined = GROUP | {"packed": True, "packed_buffer_size_bytes": 11, "packed_num_buffers": 2}
    assert live.client.post("/init_weight_transfer_engine", json={"init_info": joined}).status_code == 200
    live.scheduler.answers[weight_io_struct.UpdateWeightsFromDistributedReqInput] = refusing(400)
    reply = live.client.post("/update_weights", json={"update_info": info})
    assert reply.status_code == 400 and reply.json()["message"] == "no"
    older = info | {"packed": True, "packed_buffer_size_bytes": 1000}
    live.client.post("/update_weights", json={"update_info": older})
    live.client.post("/update_weights", json={"update_info": info | {"packed": False}})
    sent = live.sent(weight_io_struct.UpdateWeightsFromDistributedReqInput)
    assert [verb.lists()[0] for verb in sent] == [list("abcde")] * 3
    assert [verb.load_format for verb in sent] == ["packed", "packed", None]
    assert [verb.packed_buffer_size_bytes for verb in sent[:2]] == [11, 1000]


@pytest.mark.parametrize("buffer_bytes", [1, 7, 8, 9, 100])
def test_packed_buffers_are_cut_where_senders_cut_them(buffer_bytes: int) -> None:
    """A sender appends until it is over the size, and then sends."""
    metas = parse_metas(list("abcdef"), ["float32"] * 6, [[1], [1], [0], [3], [1], [1]])
    buffers, size = [[]], 0  # type: ignore[var-annotated]
    for meta in metas:
        buffers[-1].append(meta)
        size += meta.nbytes
        if size > buffer_bytes:
            buffers.append([])
            size = 0
    assert cut_packed(metas, buffer_bytes) == [buffer for buffer in buffers if buffer]
    assert cut_packed([], buffer_bytes) == []


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"packed": True}}, "init_info.master_address"),
        ("/init_weight_transfer_engine", {"init_info": GROUP | {"world_size": 0}}, "init_info.world_size"),
        ("/init_weight_transfer_engine", {"init_info": GROUP | {"nccl_unique_id_b64": "x"}}, "nccl_unique_id_b64"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/update_weights", {}, "weight_dir"),
        ("/update_weights", {"weight_dir": None}, "weight_dir"),
        ("/update_weights", {"update_info": {}}, "update_info.names"),
        ("/update_weights", {"update_info": {"names": ["a"], "shapes": [[1]]}}, "dtype_names is missing"),
        ("/update_weights", {"update_info": [TENSORS]}, "update_info"),
        ("/update_weights", {"update_info": TENSORS | {"ipc_handles_pickled": "gAM="}}, "ipc_handles_pickled is not"),
        ("/finish_weight_update", {"weight_version": 7.5}, "weight_version"),
        ("/collective_rpc", {}, "method"),
        ("/collective_rpc", {"method": "reload_weights"}, "known: update_weights_from_ipc"),
        ("/collective_rpc", {"method": "update_weights_from_ipc", "args": [{"cpu": 3}]}, "zmq_handles"),
        ("/collective_rpc", {"method": "update_weights_from_ipc", "args": [{}, 3]}, "one argument"),
        ("/collective_rpc", {"method": "skyrl_finish_weight_update", "kwargs": {"force": 1}}, "'force'"),
        ("/collective_rpc", {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"offload_kv": True}}, "offload_kv"),
        ("/areal_set_update_weight_meta", {"names": ["a"]}, "dtypes"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_with_the_reason(live: Live, path: str, body: Any, message: str) -> None:
    reply = live.client.post(path, json=body)
    assert reply.status_code == 400 and message in reply.json()["message"], reply.text
    is_coming = "update_info" in body or "meta" in path
    assert verbs(live) == ["RefusedBucket"] * is_coming, "what cannot be read may be broadcast all the same"


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        (None, "/runs/sync"),
        ("/published", "/published"),
        ("file:///published", "/published"),
        ("/published/delta-00000007", "/published"),
    ],
)
def test_a_fetch_pulls_and_the_next_update_loads_it(live: Live, uri: str | None, source: str) -> None:
    """SkyRL fetches before the pause, and updates after it."""
    body = {"target_version": 7, "sync_dir": "/runs/sync", "uri": uri}
    assert live.client.post("/fetch_weights", json=body).status_code == 200
    (pull,) = live.sent(weight_io_struct.PullWeightsReqInput)
    assert (pull.local_checkpoint_dir, pull.source_dir) == ("/runs/sync/lockstep_checkpoint", source)
    assert (pull.target_version, pull.update_memory) == (7, False)
    assert live.client.post("/start_weight_update").status_code == 200
    assert live.client.post("/update_weights", json={"update_info": {"target_version": 7}}).status_code == 200
    assert live.client.post("/finish_weight_update", json={"weight_version": "7"}).status_code == 200
    begin, load, end = live.scheduler.received[1:]
    assert begin.update_id == load.update_id == end.update_id
    assert (load.model_path, load.pulled_version) == ("/runs/sync/lockstep_checkpoint", 7)


def test_an_update_loads_only_what_was_fetched(live: Live) -> None:
    body = {"target_version": 7, "sync_dir": "/runs/sync"}
    assert live.client.post("/fetch_weights", json=body).status_code == 200
    live.scheduler.answers[weight_io_struct.PullWeightsReqInput] = refusing(400)
    assert live.client.post("/fetch_weights", json=body | {"target_version": 8}).status_code == 400
    reply = live.client.post("/update_weights", json={"update_info": {"target_version": 8}})
    assert reply.status_code == 400 and "version 7 was fetched" in reply.json()["message"]
    assert live.client.post("/update_weights", json={"update_info": {"kind": "delta"}}).status_code == 200
    assert live.sent(weight_io_struct.UpdateWeightsFromDiskReqInput)[0].pulled_version == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uri": "s3://bucket/run"}, "downloads nothing"),
        ({"target_version": -1}, "target_version"),
        ({"target_version": None}, "target_version"),
        ({"sync_dir": ""}, "sync_dir"),
        ({"sync_dir": 3}, "sync_dir"),
    ],
)
def test_a_fetch_that_cannot_be_meant_is_refused(live: Live, changes: dict[str, Any], message: str) -> None:
    reply = live.client.post("/fetch_weights", json={"target_version": 7, "sync_dir": "/runs/sync"} | changes)
    assert reply.status_code == 400 and message in reply.json()["message"], reply.text
    assert not verbs(live)


def test_without_a_group_nothing_can_be_received(tmp_path: Path) -> None:
    with live_server(write_model_folder(tmp_path)) as live:
        for path, body in (("/update_weights", {"update_info": TENSORS}), ("/shutdown_weight_transfer_engine", {})):
            reply = live.client.post(path, json=body)
            assert reply.status_code == 409 and "/init_weight_transfer_engine" in reply.json()["message"]
        assert not verbs(live)


@pytest.mark.parametrize(("failed", "dropped"), [(None, False), ("NaN", True)])
def test_a_start_drops_what_failed_and_an_init_what_is_left(live: Live, failed: str | None, dropped: bool) -> None:
    live.client.post("/start_weight_update")
    update_id = live.scheduler.received[-1].update_id

    def answer(verb: ControlReqInput) -> ControlReqOutput:
        data = {"update_id": update_id, "failed": failed}
        return ControlReqOutput(request_id=verb.request_id, success=True, data=data)

    live.scheduler.answers[weight_io_struct.GetWeightUpdateReqInput] = answer
    live.scheduler.received.clear()
    if not dropped:
        live.scheduler.answers[weight_io_struct.BeginWeightUpdateReqInput] = refusing(409)
    assert live.client.post("/start_weight_update").status_code == (200 if dropped else 409)
    assert verbs(live) == ["AbortWeightUpdate"] * dropped + ["BeginWeightUpdate"]
    live.scheduler.received.clear()
    live.client.post("/init_weight_transfer_engine", json={"init_info": GROUP})
    assert verbs(live) == ["AbortWeightUpdate"] * (not dropped) + ["InitWeightsUpdateGroup"]


def test_a_folder_of_prime_rl(live: Live) -> None:
    assert live.client.post("/update_weights", json={"weight_dir": "/weights/step_3"}).status_code == 200
    (sent,) = live.sent(weight_io_struct.UpdateWeightsFromDiskReqInput)
    assert sent.model_path == "/weights/step_3" and sent.update_id is None


def test_a_folder_is_not_loaded_into_an_update_that_somebody_started(live: Live) -> None:
    """The update may be of a trainer that is gone: the folder would be staged there, and never serve."""
    open_now: dict[str, Any] = {}

    def answer(verb: ControlReqInput) -> ControlReqOutput:
        return ControlReqOutput(request_id=verb.request_id, success=True, data=open_now)

    live.scheduler.answers[weight_io_struct.GetWeightUpdateReqInput] = answer
    live.client.post("/start_weight_update")
    open_now |= {"update_id": live.scheduler.received[-1].update_id, "failed": None}
    reply = live.client.post("/update_weights", json={"weight_dir": "/weights/step_3"})
    assert reply.status_code == 409 and "/finish_weight_update" in reply.json()["message"]
    assert not live.sent(weight_io_struct.UpdateWeightsFromDiskReqInput)
    open_now["update_id"] = None  # its lease ran out
    assert live.client.post("/update_weights", json={"weight_dir": "/weights/step_3"}).status_code == 200
    assert live.sent(weight_io_struct.UpdateWeightsFromDiskReqInput)[0].update_id is None


def test_a_new_trainer_has_nothing_to_do_with_an_update_that_is_over(live: Live) -> None:
    live.client.post("/start_weight_update")
    live.scheduler.received.clear()
    live.client.post("/init_weight_transfer_engine", json={"init_info": GROUP})
    assert live.client.post("/update_weights", json={"update_info": TENSORS}).status_code == 200
    assert live.sent(weight_io_struct.UpdateWeightsFromDistributedReqInput)[0].update_id is None
    assert verbs(live) == ["InitWeightsUpdateGroup", "UpdateWeightsFromDistributed"]


def test_a_start_is_not_forgotten_by_a_call_that_came_before_it(live: Live) -> None:
    """The call's look at the open update is older than the start."""
    looks = threading.Event()
    held: list[ControlReqInput] = []

    def hold(verb: ControlReqInput) -> ControlReqOutput | None:
        held.append(verb)
        looks.set()
        return None

    assert live.client.post("/start_weight_update").status_code == 200
    live.scheduler.answers[weight_io_struct.GetWeightUpdateReqInput] = hold
    joining = threading.Thread(
        target=live.client.post, args=("/init_weight_transfer_engine",), kwargs={"json": {"init_info": GROUP}}
    )
    joining.start()
    assert looks.wait(5)
    assert live.client.post("/finish_weight_update").status_code == 200
    assert live.client.post("/start_weight_update").status_code == 200
    started = live.scheduler.received[-1].update_id
    live.scheduler._send(ControlReqOutput(request_id=held[0].request_id, success=True, data={"update_id": None}))
    joining.join(10)
    live.scheduler.answers.clear()
    assert live.client.post("/finish_weight_update").status_code == 200
    assert live.sent(weight_io_struct.EndWeightUpdateReqInput)[-1].update_id == started


Start = Callable[[], ControlReqInput]
"""Begins an update whose answer is held back, waits until its client has left, and returns the verb."""


@pytest.fixture
def start_and_leave(live: Live) -> Iterator[Start]:
    held: list[ControlReqInput] = []

    def hold(verb: ControlReqInput) -> ControlReqOutput | None:
        held.append(verb)
        return None

    def start() -> ControlReqInput:
        live.scheduler.answers[weight_io_struct.BeginWeightUpdateReqInput] = hold
        with pytest.raises(httpx.ReadTimeout):
            live.client.post("/start_weight_update", timeout=0.3)
        del live.scheduler.answers[weight_io_struct.BeginWeightUpdateReqInput]
        return held[-1]

    yield start
    for verb in held:
        live.scheduler._send(refusing(409)(verb))


def test_a_start_that_is_refused_does_not_hide_one_that_is_under_way(live: Live, start_and_leave: Start) -> None:
    """The look at the open update is answered at once, and does not see a start that waits for its turn."""
    begin = start_and_leave()
    live.scheduler.answers[weight_io_struct.BeginWeightUpdateReqInput] = refusing(409)
    for _ in range(2):
        assert live.client.post("/start_weight_update").status_code == 409
    live.scheduler._send(ControlReqOutput(request_id=begin.request_id, success=True))
    assert live.client.post("/start_weight_update").status_code == 409
    assert live.client.post("/finish_weight_update").status_code == 200
    assert live.sent(weight_io_struct.EndWeightUpdateReqInput)[-1].update_id == begin.update_id


def test_a_start_whose_client_left_gives_way_to_the_next(live: Live, start_and_leave: Start) -> None:
    begin = start_and_leave()
    assert live.client.post("/start_weight_update").status_code == 200
    started = live.scheduler.received[-1].update_id
    assert live.client.post("/finish_weight_update").status_code == 200
    assert live.sent(weight_io_struct.EndWeightUpdateReqInput)[-1].update_id == started != begin.update_id
    assert live.client.post("/finish_weight_update").status_code == 409, "the first is over where the second began"


def test_a_start_whose_client_left_is_dropped_by_a_new_trainer(live: Live, start_and_leave: Start) -> None:
    """The drop takes its turn behind the start, which a look at the open update does not see yet."""
    begin = start_and_leave()
    live.client.post("/init_weight_transfer_engine", json={"init_info": GROUP})
    assert [verb.update_id for verb in live.sent(weight_io_struct.AbortWeightUpdateReqInput)] == [begin.update_id]
    assert live.client.post("/finish_weight_update").status_code == 409


def test_starts_without_answers_do_not_pile_up(
    live: Live, start_and_leave: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weight_routes, "MAX_UNANSWERED", 2)
    begun = [start_and_leave().update_id for _ in range(3)]
    dropped = [verb.update_id for verb in live.sent(weight_io_struct.AbortWeightUpdateReqInput)]
    assert dropped == begun[:2]


def test_a_finish_whose_turn_came_too_late_drops_the_update(live: Live) -> None:
    """The finish ended nothing, and no other caller could end the update."""
    live.client.post("/start_weight_update")
    started = live.scheduler.received[-1].update_id

    def look(verb: ControlReqInput) -> ControlReqOutput:
        return ControlReqOutput(request_id=verb.request_id, success=True, data={"update_id": started, "failed": None})

    live.scheduler.answers[weight_io_struct.EndWeightUpdateReqInput] = refusing(504)
    live.scheduler.answers[weight_io_struct.GetWeightUpdateReqInput] = look
    live.scheduler.answers[weight_io_struct.AbortWeightUpdateReqInput] = refusing(504)
    assert live.client.post("/finish_weight_update").status_code == 504
    assert live.client.post("/finish_weight_update").status_code == 504, "it is not forgotten while it is open"
    del live.scheduler.answers[weight_io_struct.AbortWeightUpdateReqInput]
    assert live.client.post("/finish_weight_update").status_code == 504
    assert live.sent(weight_io_struct.AbortWeightUpdateReqInput)[-1].update_id == started
    assert live.client.post("/finish_weight_update").status_code == 409


def test_a_pause_that_waits_is_taken_back_with_its_client(live: Live) -> None:
    live.scheduler.answers[io_struct.PauseGenerationReqInput] = lambda verb: None
    for path in ("/pause?mode=wait", "/pause_generation"):
        live.scheduler.received.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}{path}", json={"mode": "wait"}, timeout=0.3, trust_env=False)
        live.wait_until(lambda: bool(live.sent(io_struct.GiveUpPauseReqInput)))
        [pause], [given] = live.sent(io_struct.PauseGenerationReqInput), live.sent(io_struct.GiveUpPauseReqInput)
        assert pause.wait_id == given.wait_id is not None


def test_a_pause_that_waits_and_fails_somewhere_is_taken_back_everywhere(live: Live) -> None:
    live.scheduler.answers[io_struct.PauseGenerationReqInput] = refusing(409)
    assert live.client.post("/pause?mode=wait").status_code == 409
    assert verbs(live) == ["PauseGeneration", "GiveUpPause"]
    live.scheduler.answers.clear()
    live.scheduler.received.clear()
    assert live.client.post("/pause?mode=wait").status_code == 200
    assert "GiveUpPause" not in verbs(live)


def test_one_replica_that_is_paused_is_a_pause() -> None:
    answers = [
        ControlReqOutput(request_id="a", success=True, dp_rank=rank, data=io_struct.GiveUpPauseReply(paused=paused))
        for rank, paused in ((0, False), (1, True))
    ]
    assert merge_answers(answers).reply.paused is True
    assert merge_answers(answers[:1] * 2).reply.paused is False


def test_replicas_with_different_messages_are_all_heard() -> None:
    def merged(*messages: str, success: bool = True) -> str:
        answers = [
            ControlReqOutput(request_id="a", success=success or rank > 1, message=text, dp_rank=rank, data=NoReply())
            for rank, text in reversed(list(enumerate(messages)))
        ]
        return merge_answers(answers).message

    assert merged("Done.", "Done.") == merged("Done.") == "Done."
    assert merged("Done.", "Torn.") == "data-parallel rank 0: Done. | data-parallel rank 1: Torn."
    assert merged("Done.", "Torn.", "Done.") == "data-parallel rank 0, 2: Done. | data-parallel rank 1: Torn."
    assert merged("no", "never", "Done.", success=False) == "no", "the first refusal"


def test_collective_rpc_takes_names_of_a_closed_list(live: Live) -> None:
    state(live)
    steps: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("update_weights_from_ipc", [{"cpu": "ipc:///tmp/x"}], {}),
        ("skyrl_start_weight_update", [], {"is_checkpoint_format": True}),
        ("update_weights_nccl", [], {"update_info": TENSORS}),
        ("skyrl_finish_weight_update", [], {}),
        ("skyrl_sleep_for_weight_sync", [], {"offload_kv": False}),
        ("skyrl_wake_for_weight_sync", [], {"tags": ["weights"]}),
    ]
    for method, args, kwargs in steps:
        body = {"method": method, "args": args, "kwargs": kwargs, "timeout": 300}
        reply = live.client.post("/collective_rpc", json=body)
        assert reply.status_code == 200 and reply.json() == {"results": [None]}, reply.text
    assert verbs(live) == [
        "UpdateWeightsFromIPC", "BeginWeightUpdate", "UpdateWeightsFromDistributed", "EndWeightUpdate",
        "PauseGeneration", "ReleaseMemoryOccupation",
    ]  # fmt: skip
    live.scheduler.answers[weight_io_struct.UpdateWeightsFromIPCReqInput] = refusing(502)
    reply = live.client.post("/collective_rpc", json={"method": "update_weights_from_ipc", "args": [{"cpu": "x"}]})
    assert reply.status_code == 502 and reply.json()["message"] == "no"


def test_calls_of_areal_become_verbs_in_order(live: Live) -> None:
    group = GROUP | {"master_port": "5", "group_name": "g", "backend": "gloo"}
    meta = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]], "group_name": "g"}
    assert live.client.post("/areal_pause_generation", json={}).json()["success"]
    assert live.client.post("/areal_init_weights_update_group", json=group).json()["success"]
    assert live.client.post("/areal_update_weights_xccl", json={}).status_code == 409
    assert live.client.post("/areal_set_update_weight_meta", json=meta).json()["success"]
    assert live.client.post("/areal_update_weights_xccl", json={}).json()["success"]
    assert live.client.post("/areal_update_weights_xccl", json={}).status_code == 409
    assert live.client.post("/areal_update_weights", json={"model_path": "/w"}).json()["success"]
    assert live.client.post("/areal_continue_generation", json={}).json()["success"]
    assert verbs(live) == [
        "PauseGeneration", "FlushCache", "InitWeightsUpdateGroup", "UpdateWeightsFromDistributed",
        "UpdateWeightsFromDisk", "ContinueGeneration",
    ]  # fmt: skip
    assert live.sent(weight_io_struct.UpdateWeightsFromDistributedReqInput)[0].group_name == "g"
    assert live.sent(weight_io_struct.InitWeightsUpdateGroupReqInput)[0].master_port == 5


def test_an_adapter_of_areal_is_an_update_of_its_own(live: Live) -> None:
    """The stand-in misses no tensor, so each call is a whole adapter."""
    lists = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 2]], "group_name": "g"}
    lora = {"lora_name": "poet-v1", "lora_int_id": 1, "lora_target_modules": ["q_proj"], "lora_rank": 2}
    body = lists | lora | {"lora_alpha": 4, "lora_bias": "none", "base_model_name": "tiny"}
    reply = live.client.post("/areal_set_update_weight_meta_lora", json=body)
    assert reply.json() == {"success": True, "message": "1 tensors announced."} and verbs(live) == []
    for path in ("/areal_set_update_weight_meta_lora", "/areal_update_weights_lora_xccl"):
        assert "lora_bias" in live.client.post(path, json=body | {"lora_bias": None}).json()["message"]
    live.scheduler.received.clear()
    live.client.post("/areal_update_weights_lora_xccl", json=body)
    live.client.post("/areal_update_weights_lora_xccl", json=body | {"lora_name": "poet-v2"})
    (begin, _) = live.sent(weight_io_struct.BeginWeightUpdateReqInput)
    assert begin.target is not None and begin.target.adapter == "poet-v1" and not begin.has_manifest
    assert begin.target.config == {
        "peft_type": "LORA", "target_modules": ["q_proj"], "r": 2, "lora_alpha": 4, "bias": "none"
    }  # fmt: skip
    update = ["BeginWeightUpdate", "UpdateWeightsFromDistributed", "EndWeightUpdate"]
    assert verbs(live) == [*update, *update, "UnloadLoraAdapter"]
    (unload,) = live.sent(UnloadLoraAdapterReqInput)
    assert (unload.lora_name, unload.retire, unload.missing_ok) == ("poet-v1", True, True)

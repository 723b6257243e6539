"""A server of two ranks and a trainer that does what none should: every call is answered, and the server serves on."""

from __future__ import annotations

import base64
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
import zmq

from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from tests.sglang_payloads import forking_pickle
from tests.slow_calls import Call, rendezvous
from tests.weight_group_helpers import in_background
from weight_sync.bucket import pack
from weight_sync.process_group import GroupHandle, free_port, init_process_group

pytestmark = pytest.mark.full

TIMEOUT_S = 5.0
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in logical_tensors(folder).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    settings = {"dtype": "bfloat16", "max_total_tokens": 512, "num_threads": 1, "weight_update_timeout": TIMEOUT_S}
    with ServerProcess(folder, tp_size=2, ep_size=2, **settings) as server:
        yield server


def digest(server: ServerProcess) -> str:
    return server.http.post("/weights_checker", json={"action": "checksum"}).json()["digest"]


def join(server: ServerProcess) -> GroupHandle:
    """Make a group with the server's two ranks; return the trainer's end of it."""
    port = free_port()
    fields = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
    answer = in_background(lambda: server.client.init_weights_update_group(**fields, group_name=f"group{port}"))
    group = init_process_group("127.0.0.1", port, 0, 3, f"group{port}", "gloo", TIMEOUT_S)
    assert answer(2 * TIMEOUT_S) is None
    return group


def test_w05_a_silent_listener_holds_up_nobody(server: ServerProcess) -> None:
    """The call is a 502 at its deadline, and the weight verbs after it are answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        start = time.monotonic()
        refused = server.http.post(
            "/init_weights_update_group",
            json={"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3},
        )
        assert refused.status_code == 502 and "did not answer" in refused.text
        assert time.monotonic() - start < TIMEOUT_S + 5.0
        assert digest(server)
        assert server.http.get("/health").status_code == 200


def test_w09_a_bucket_of_twice_the_bytes_announced(server: ServerProcess, tensors: dict[str, torch.Tensor]) -> None:
    """A bucket of float32 that was announced as bfloat16 is refused, and the same group brings the right one."""
    group = join(server)
    before = digest(server)
    fields = {
        "names": list(tensors),
        "dtypes": ["bfloat16"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": group.name,
        "load_format": "flattened_bucket",
    }
    for dtype, status in ((torch.float32, 400), (torch.bfloat16, 200)):
        server.client.begin_weight_update("wide")
        flat = pack([(name, (tensor * 2).to(dtype)) for name, tensor in tensors.items()])
        sent = group.start_broadcast(flat)
        answer = server.http.post("/update_weights_from_distributed", json=fields)
        group.finish(sent, time.monotonic() + TIMEOUT_S)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert "longer than" in answer.text
            server.client.abort_weight_update()
            assert digest(server) == before
        else:
            server.client.end_weight_update()
            assert digest(server) != before
    group.destroy()


def test_w21_tensors_in_shared_memory_serialized_once_for_each_rank(
    server: ServerProcess, tensors: dict[str, torch.Tensor]
) -> None:
    """SGLang's own form: both ranks read the same memory, each is counted, and it goes when the last has read."""
    before, strategy = shared_files(), torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        named = [(NORM, tensors[NORM] * 3)]
        texts = [base64.b64encode(forking_pickle(named)).decode() for _ in range(2)]
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    assert texts[0] == texts[1] and shared_files() - before
    answer = server.http.post("/update_weights_from_tensor", json={"serialized_named_tensors": texts})
    assert answer.status_code == 200, answer.text
    read = server.http.post("/get_weights_by_name", json={"name": NORM, "truncate_size": 4}).json()
    assert read == named[0][1][:4].double().tolist()
    del named
    assert not shared_files() - before


def shared_files() -> set[Path]:
    """Return the files of the memory that this process shares by torch's names."""
    return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


# --- W24: a sender that is gone ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gated_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe", seed=1)


@pytest.fixture(scope="module")
def two_ranks(gated_folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(gated_folder, tp_size=2) as server:
        yield server


@pytest.fixture
def stuck(two_ranks: ServerProcess) -> Iterator[Callable[[], Call]]:
    """Yield a function that starts a bucket which is never sent."""
    groups = []

    def start() -> Call:
        server, port = two_ranks, free_port()
        name = f"g{port}"
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
        joining = Call(server, "/init_weights_update_group", body | {"group_name": name})
        groups.append(init_process_group("127.0.0.1", port, 0, 3, name, "gloo", 60.0))
        assert joining.wait(30).status_code == 200
        names = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[320, 48]]}
        bucket = Call(server, "/update_weights_from_distributed", names | {"group_name": name})
        time.sleep(1.0)
        assert bucket.is_alive(), bucket.reply and bucket.reply.text
        return bucket

    yield start
    for group in groups:
        group.destroy()


@pytest.mark.full
def test_w24_an_abort_ends_a_receive_that_nobody_will_finish(
    two_ranks: ServerProcess, stuck: Callable[[], Call]
) -> None:
    begun = two_ranks.http.post("/begin_weight_update", json={"weight_version": "v1"})
    assert begun.status_code == 200
    bucket, started = stuck(), time.monotonic()
    aborted = two_ranks.http.post("/abort_weight_update", json={})
    assert aborted.status_code == 200 and time.monotonic() - started < 8
    refused = bucket.wait(1)
    assert refused.status_code == 502 and "AbortWeightUpdate" in refused.json()["message"]
    assert two_ranks.http.post("/begin_weight_update", json={"weight_version": "v2"}).status_code == 200
    assert two_ranks.http.post("/abort_weight_update", json={}).status_code == 200


@pytest.mark.full
def test_w24_a_continue_does_not_wait_for_a_trainer_that_is_gone(
    two_ranks: ServerProcess, stuck: Callable[[], Call]
) -> None:
    assert two_ranks.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    bucket, started = stuck(), time.monotonic()
    continued = [two_ranks.http.post("/continue_generation", json={}) for _ in range(2)]
    assert time.monotonic() - started < 20
    assert [reply.status_code for reply in continued] == [409, 200]  # the lost update is reported once
    assert bucket.wait(1).status_code == 502
    reply = two_ranks.http.post(
        "/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    )
    assert reply.status_code == 200 and reply.json()["meta_info"]["weight_version"] == "default"


@pytest.mark.full
def test_w24_an_abort_ends_other_waits_too(gated_folder: Path, tmp_path: Path) -> None:
    """An abort ends the wait for a peer that is silent on its socket, and for a peer that never comes."""
    silent = zmq.Context().socket(zmq.REQ)
    silent.bind(f"ipc://{tmp_path}/silent")
    with ServerProcess(gated_folder) as server:
        for start in (
            lambda: Call(server, "/update_weights_from_ipc", {"zmq_handles": {"cpu": f"ipc://{tmp_path}/silent"}}),
            lambda: rendezvous(server),
        ):
            call, started = start(), time.monotonic()
            time.sleep(0.5)
            assert call.is_alive(), call.reply and call.reply.text
            server.http.post("/abort_weight_update", json={})
            assert call.wait(8).status_code == 502 and time.monotonic() - started < 8
            assert server.http.get("/weight_update").json()["open"] is False
    silent.close(linger=0)

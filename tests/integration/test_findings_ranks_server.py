"""Servers whose ranks stop, whose trainers die within a call, and which are stopped within one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess
from weight_sync.process_group import free_port, init_process_group


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe", seed=1)


class Call(threading.Thread):
    """A POST on a thread of its own."""

    def __init__(self, server: ServerProcess, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = server.url + path, body
        self.reply: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.reply = httpx.post(self._url, json=self._body, timeout=60, trust_env=False)

    def wait(self, seconds: float) -> httpx.Response:
        self.join(seconds)
        assert self.reply is not None, f"no answer within {seconds} s"
        return self.reply


def rendezvous(server: ServerProcess) -> Call:
    """Start a weight verb that takes as long as it may: nothing listens at its address."""
    body = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    call = Call(server, "/init_weights_update_group", body)
    time.sleep(0.7)
    return call


# --- W24: a sender that is gone ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, tp_size=2) as server:
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
        names = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[320, 64]]}
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
    assert [reply.status_code for reply in continued] == [409, 200]  # the update that was lost is told of once
    assert bucket.wait(1).status_code == 502
    reply = two_ranks.http.post(
        "/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    )
    assert reply.status_code == 200 and reply.json()["meta_info"]["weight_version"] == "default"


@pytest.mark.full
def test_w24_an_abort_ends_other_waits_too(folder: Path, tmp_path: Path) -> None:
    """An abort ends the wait for a peer on a socket that says nothing, and for one that never comes."""
    silent = zmq.Context().socket(zmq.REQ)
    silent.bind(f"ipc://{tmp_path}/silent")
    with ServerProcess(folder) as server:
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


# --- W25: a rank that is stopped --------------------------------------------------------------------------------------


@pytest.mark.full
def test_w25_health_says_soon_that_a_rank_is_stopped(two_ranks: ServerProcess) -> None:
    pid = two_ranks.rank_pids()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        ill = two_ranks.http.get("/health")
        assert time.monotonic() - started < 5
        assert ill.status_code == 503 and "a rank is stopped" in ill.json()["error"]["message"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert two_ranks.http.get("/model_info").status_code == 200
    assert two_ranks.http.get("/health").status_code == 200


# --- W22: told to stop within a weight verb ---------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("timeout_s", "drain_s", "status"), [(2.0, 20.0, 502), (30.0, 1.0, 503)])
def test_w22_a_weight_verb_under_way_is_answered_before_the_server_stops(
    folder: Path, timeout_s: float, drain_s: float, status: int
) -> None:
    """Its own outcome is the answer if that comes in time, else 503; on a server that has nothing else to do."""
    with ServerProcess(folder, weight_update_timeout=timeout_s, drain_timeout=drain_s) as server:
        call = rendezvous(server)
        server.process.send_signal(signal.SIGTERM)
        reply = call.wait(20)
        assert reply.status_code == status and reply.json()["success"] is False
        assert server.wait_exit() == 0
        assert "Traceback" not in server.stderr()

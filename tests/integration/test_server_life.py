"""A real server's start and end: refusals in one line, death of the scheduler, SIGTERM, leftovers, other settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess, alive
from tests.slow_calls import rendezvous


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe", seed=1, shards=2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "d", "dense", seed=1)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def fails_to_start(folder: Path, **settings) -> str:
    """Start a server that must fail; return its error, which must be one line."""
    server = ServerProcess(folder, **settings)
    try:
        assert server.wait_exit(60) == 1
        said = server.stderr()
        errors = [line for line in said.splitlines() if line.startswith("lockstep: error:")]
        assert len(errors) == 1 and "Traceback" not in said, said
        assert server.leftovers() == []
        return errors[0]
    finally:
        server.close()


@pytest.mark.full
def test_startup_errors_are_one_line(folder: Path, dense: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    missing = copy("missing")
    sorted(missing.glob("*.safetensors"))[0].unlink()
    assert "safetensors" in fails_to_start(missing)
    truncated = copy("truncated")
    shard = sorted(truncated.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert shard.name in fails_to_start(truncated)
    other = copy("other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM" in fails_to_start(other)
    assert "not a folder" in fails_to_start(tmp_path / "nowhere")
    assert "router" in fails_to_start(dense, enable_return_routed_experts=True)
    assert "--api-key" in fails_to_start(folder, host="0.0.0.0")


@pytest.mark.full
def test_a_taken_port_is_named_in_the_error(folder: Path) -> None:
    with ServerProcess(folder) as first:
        said = fails_to_start(folder, port=first.port)
        assert str(first.port) in said
        assert first.http.get("/health").status_code == 200, "the first server is not disturbed"


@pytest.mark.serial
@pytest.mark.full
def test_killing_the_scheduler_ends_the_server_with_the_reason(folder: Path) -> None:
    before = shared_memory()
    server = ServerProcess(folder)
    try:
        server.wait_ready()
        pid = server.scheduler_pid()
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        assert server.wait_exit(10) == 1
        assert time.monotonic() - start < 10
        assert "scheduler" in server.stderr()
        assert not alive(pid) and server.leftovers() == [] and shared_memory() <= before
    finally:
        server.close()


@pytest.mark.full
def test_killing_the_server_ends_the_scheduler(folder: Path) -> None:
    server = ServerProcess(folder)
    try:
        server.wait_ready()
        pid = server.scheduler_pid()
        server.process.kill()
        deadline = time.monotonic() + 10
        while alive(pid):
            assert time.monotonic() < deadline, "the scheduler outlived its server"
            time.sleep(0.05)
    finally:
        server.close()


@pytest.mark.serial
@pytest.mark.full(but="15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(folder: Path, number: signal.Signals) -> None:
    before = shared_memory()
    server = ServerProcess(folder)
    try:
        server.wait_ready()
        pid = server.scheduler_pid()
        replies: list[httpx.Response] = []
        body = {"text": "1 + 1", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        thread = threading.Thread(target=lambda: replies.append(server.http.post("/generate", json=body)))
        thread.start()
        while server.http.get("/get_load").json()[0]["num_running_reqs"] == 0 and thread.is_alive():
            time.sleep(0.005)
        server.process.send_signal(number)
        assert server.wait_exit() == 0
        thread.join(10)
        assert replies[0].status_code == 200
        assert replies[0].json()["meta_info"]["completion_tokens"] == 200, "a running request finishes"
        assert not alive(pid) and server.leftovers() == [] and shared_memory() <= before
    finally:
        server.close()


@pytest.mark.full
def test_routes_by_default_and_routes_refused(folder: Path, dense: Path) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
    with ServerProcess(folder, return_routed_experts_by_default=True) as server:
        meta = server.http.post("/generate", json=body).json()["meta_info"]
        assert meta["routed_experts"] and meta["routed_experts_start_len"] == 0
    with ServerProcess(folder, api_key="k", admin_api_key="a") as server:

        def ask(path: str, key: str | None, **content) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return server.http.post(path, json=content, headers=headers).status_code

        assert ask("/generate", None, **body) == 401 and ask("/generate", "x", **body) == 401
        assert ask("/generate", "k", **body) == 200
        assert ask("/generate", "k", **body, return_routed_experts=True) == 400, "no recording on this server"
        assert ask("/pause_generation", "k") == 401 and ask("/pause_generation", "a") == 200
        assert server.http.get("/health").status_code == 200
    with ServerProcess(dense) as server:
        response = server.http.post("/generate", json=body | {"return_routed_experts": True})
        assert response.status_code == 400 and "dense" in response.text
        assert server.http.post("/generate", json=body).status_code == 200


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, tp_size=2) as server:
        yield server


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


@pytest.mark.full
@pytest.mark.parametrize(("timeout_s", "drain_s", "status"), [(2.0, 20.0, 502), (30.0, 1.0, 503)])
def test_w22_a_weight_verb_under_way_is_answered_before_the_server_stops(
    folder: Path, timeout_s: float, drain_s: float, status: int
) -> None:
    """The answer is the verb's own outcome if that comes in time, and 503 otherwise; the server is idle but for it."""
    with ServerProcess(folder, weight_update_timeout=timeout_s, drain_timeout=drain_s) as server:
        call = rendezvous(server)
        server.process.send_signal(signal.SIGTERM)
        reply = call.wait(20)
        assert reply.status_code == status and reply.json()["success"] is False
        assert server.wait_exit() == 0
        assert "Traceback" not in server.stderr()

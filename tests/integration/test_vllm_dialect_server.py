"""A trainer that speaks vLLM's dialect, and a real server: pause, transfer in packed buffers, sleep; all or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.process_group import GroupHandle, free_port, init_process_group
from weight_sync.tensor_meta import dtype_name

pytestmark = pytest.mark.full

TIMEOUT_S = 30.0
BUFFER_BYTES = 20_000
LONG = 1500  # tokens: seconds
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3, context_length=2048)


@pytest.fixture(scope="module")
def tensors(folder: Path) -> Tensors:
    return logical_tensors(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    flags = {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "dtype": "float32"}
    with ServerProcess(folder, max_total_tokens=4096, weight_version="0", **flags) as running:
        yield running


class Trainer:
    """Does what vLLM's trainer engine does: each request on a thread, and the broadcast at the same time."""

    def __init__(self, server: ServerProcess, packed: bool = True) -> None:
        self._server = server
        self._packed = packed
        self._pool = ThreadPoolExecutor(4)
        port = free_port()
        info = {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
            "world_size": 1 + server.http.get("/get_world_size").json()["world_size"],
            "packed": packed, "packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": 2,
        }  # fmt: skip
        joined = self.post("/init_weight_transfer_engine", {"init_info": info})
        self.group: GroupHandle = init_process_group("127.0.0.1", port, 0, 2, "weight_update_group", "gloo", TIMEOUT_S)
        assert joined.result(TIMEOUT_S).status_code == 200, joined.result().text

    def post(self, path: str, body: Any = None) -> Future[httpx.Response]:
        return self._pool.submit(self._server.http.post, path, json=body)

    def update(self, tensors: Tensors, path: str = "/update_weights", wrap: Any = None) -> httpx.Response:
        info = {
            "names": list(tensors),
            "dtype_names": [dtype_name(tensor.dtype) for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        body = {"update_info": info} if wrap is None else wrap(info)
        reply = self.post(path, body)
        for message in _packed(list(tensors.values())) if self._packed else tensors.values():
            self.group.finish(self.group.start_broadcast(message), time.monotonic() + TIMEOUT_S)
        return reply.result(TIMEOUT_S)

    def close(self) -> None:
        self.group.destroy()
        self._pool.shutdown()


def _packed(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        parts.append(tensor.contiguous().flatten().view(torch.uint8))
        if sum(part.numel() for part in parts) > BUFFER_BYTES:
            yield torch.cat(parts)
            parts = []
    if parts:
        yield torch.cat(parts)


@pytest.fixture
def trainer(server: ServerProcess) -> Iterator[Trainer]:
    running = Trainer(server)
    yield running
    running.close()


def ok(server: ServerProcess, method: str, path: str, **arguments: Any) -> dict[str, Any]:
    reply = server.http.request(method, path, **arguments)
    assert reply.status_code == 200, reply.text
    return reply.json()


def checksums(server: ServerProcess) -> dict[str, str]:
    return server.client.weights_checker("checksum")["checksums"]


def expected(tensors: Tensors) -> dict[str, str]:
    return {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}


def scaled(tensors: Tensors, factor: float) -> Tensors:
    return {name: tensor * factor for name, tensor in tensors.items()}


def generate(server: ServerProcess, num_tokens: int, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    return ok(server, "POST", "/generate", json={"input_ids": [5, 9, 2], "sampling_params": params} | fields)


def in_background(server: ServerProcess, num_tokens: int, **fields: Any) -> Future[dict[str, Any]]:
    future: Future[dict[str, Any]] = Future()
    threading.Thread(target=lambda: future.set_result(generate(server, num_tokens, **fields))).start()
    deadline = time.monotonic() + TIMEOUT_S
    while server.http.get("/get_load").json()[0]["num_running_reqs"] == 0:
        assert time.monotonic() < deadline and not future.done()
        time.sleep(0.005)
    return future


def test_a_refresh_in_packed_buffers_around_a_running_request(
    server: ServerProcess, trainer: Trainer, tensors: Tensors
) -> None:
    """The round of TRL's and SkyRL's clients: pause keeping requests, start, update, finish, resume."""
    new = scaled(tensors, 0.5)
    assert len(list(_packed(list(new.values())))) > 3
    running = in_background(server, LONG)
    ok(server, "POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
    assert ok(server, "GET", "/is_paused") == {"is_paused": True}
    ok(server, "POST", "/start_weight_update")
    assert trainer.update(new).status_code == 200
    assert server.client.weight_version() == "0", "nothing is in force before the finish"
    ok(server, "POST", "/finish_weight_update", json={"weight_version": "1"})
    assert checksums(server) == expected(new)
    ok(server, "POST", "/resume")
    meta = running.result(TIMEOUT_S)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["0", "1"]
    assert meta["completion_tokens"] == LONG


def test_one_call_a_tensor_makes_one_update(server: ServerProcess, tensors: Tensors) -> None:
    trainer = Trainer(server, packed=False)
    new = dict(sorted(scaled(tensors, 0.75).items())[:5])
    before, version = checksums(server), server.client.weight_version()
    ok(server, "POST", "/start_weight_update", json={})
    for name, tensor in new.items():
        assert trainer.update({name: tensor}).status_code == 200
    assert server.client.weight_version() == version
    ok(server, "POST", "/finish_weight_update", json={})
    assert server.client.weight_version() == f"{version}+1"
    assert checksums(server) == before | expected(new)
    trainer.close()


def test_half_a_refresh_is_not_in_force_under_the_whole_label(server: ServerProcess, tensors: Tensors) -> None:
    """D7: a trainer whose adapter forgets a module sees it in the label; the other half makes the version whole."""
    trainer = Trainer(server)
    new, names = scaled(tensors, 1.25), sorted(tensors)
    half = {name: new[name] for name in names[::2]}
    for part, label in ((half, f"7~{len(half)}of{len(new)}"), ({n: new[n] for n in names[1::2]}, "7")):
        ok(server, "POST", "/start_weight_update")
        assert trainer.update(part).status_code == 200
        finished = ok(server, "POST", "/finish_weight_update", json={"weight_version": "7"})
        assert finished["weight_version"] == label == server.client.weight_version()
        assert f"{len(part)} of {len(new)} tensors came" in finished["message"]
        assert generate(server, 2)["meta_info"]["weight_version"] == label
    assert checksums(server) == expected(new)
    trainer.close()


def test_a_bad_tensor_amid_the_buffers_changes_nothing(
    server: ServerProcess, trainer: Trainer, tensors: Tensors
) -> None:
    """Every buffer is taken all the same, so the group serves the next update."""
    before, version = checksums(server), server.client.weight_version()
    names = sorted(tensors)
    bad = scaled(tensors, 2.0) | {names[3]: torch.full_like(tensors[names[3]], torch.nan)}
    ok(server, "POST", "/start_weight_update")
    refused = trainer.update(dict(sorted(bad.items())))
    assert refused.status_code == 400 and "finite" in refused.json()["error"]["message"]
    finished = server.http.post("/finish_weight_update")
    assert finished.status_code == 409 and names[3] in finished.json()["message"]
    assert (checksums(server), server.client.weight_version()) == (before, version)
    ok(server, "POST", "/start_weight_update")
    assert trainer.update(bad).status_code == 400
    ok(server, "POST", "/start_weight_update")  # its sender did not finish the one that failed
    assert trainer.update(tensors).status_code == 200
    ok(server, "POST", "/finish_weight_update", json={"weight_version": "3"})
    assert checksums(server) == expected(tensors) and server.client.weight_version() == "3"


def test_an_update_that_nobody_finished_gives_way_to_a_new_trainer(server: ServerProcess, tensors: Tensors) -> None:
    trainer = Trainer(server)
    before = checksums(server)
    ok(server, "POST", "/start_weight_update")
    assert trainer.update(scaled(tensors, 4.0)).status_code == 200
    second = server.http.post("/start_weight_update")
    assert second.status_code == 409 and "already open" in second.json()["message"]
    trainer.close()
    again = Trainer(server)
    ok(server, "POST", "/start_weight_update")
    ok(server, "POST", "/finish_weight_update", json={"weight_version": "nothing new"})
    assert checksums(server) == before and server.client.weight_version() == "nothing new"
    again.close()


def test_weights_that_a_trainer_sends_back_after_a_reset_match(
    server: ServerProcess, trainer: Trainer, tensors: Tensors
) -> None:
    """The check that vLLM documents: checksums, reset, transfer, comparison with the checksums."""

    def compared(baseline: dict[str, str]) -> dict[str, Any]:
        return ok(server, "POST", "/weight_checker", json={"action": "compare", "baseline": baseline})

    baseline = ok(server, "POST", "/weight_checker", json={"action": "checksum"})["checksums"]
    assert baseline == checksums(server)
    assert compared(baseline) == {"match": True, "mismatches": []}
    name = min(tensors)
    assert compared(baseline | {name: "0" * 16}) == {"match": False, "mismatches": [name]}
    assert server.http.post("/weight_checker", json={"action": "compare"}).status_code == 400
    assert ok(server, "POST", "/weight_checker", json={"action": "reset"}) == {"status": "reset"}
    assert compared(baseline) == {"match": False, "mismatches": sorted(baseline)}
    assert server.http.post("/generate", json={"input_ids": [1]}).status_code == 503
    ok(server, "POST", "/start_weight_update")
    assert trainer.update(tensors).status_code == 200
    ok(server, "POST", "/finish_weight_update", json={"weight_version": "sent back"})
    assert compared(expected(tensors)) == {"match": True, "mismatches": []}
    assert generate(server, 2)["meta_info"]["weight_version"] == "sent back"


def test_sleep_keeps_the_weights_at_level_1_and_drops_them_at_level_2(
    server: ServerProcess, trainer: Trainer, tensors: Tensors
) -> None:
    """Level 1 restores the same bits.  Weights that level 2 dropped come from the trainer, and generation goes on."""
    old = generate(server, 8)["output_ids"]
    ok(server, "POST", "/sleep")
    assert ok(server, "GET", "/is_sleeping") == {"is_sleeping": True}
    assert server.http.post("/generate", json={"input_ids": [1]}).status_code == 503
    assert ok(server, "POST", "/wake_up", params={"tags": ["weights"]})["status"] == "sleeping"
    assert ok(server, "POST", "/wake_up", params={"tags": ["kv_cache"]})["status"] == "awake"
    assert ok(server, "GET", "/is_sleeping") == {"is_sleeping": False}
    assert generate(server, 8)["output_ids"] == old
    ok(server, "POST", "/sleep", params={"level": 2})
    ok(server, "POST", "/wake_up", params={"tags": ["weights"]})
    new = scaled(tensors, 0.5)
    ok(server, "POST", "/start_weight_update")
    assert trainer.update(new).status_code == 200
    ok(server, "POST", "/finish_weight_update", json={"weight_version": "5"})
    assert ok(server, "POST", "/wake_up", params={"tags": ["kv_cache"]})["status"] == "awake"
    assert checksums(server) == expected(new)
    assert generate(server, 8)["meta_info"]["weight_version"] == "5"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_aborts_awaits_or_keeps_requests_by_its_mode(server: ServerProcess, mode: str) -> None:
    running = in_background(server, LONG)
    ok(server, "POST", "/pause", params={"mode": mode})
    assert running.done() or mode != "wait", "it has ended before the answer"
    late = ThreadPoolExecutor(1).submit(generate, server, 2)
    if mode == "keep":
        assert ok(server, "POST", "/reset_prefix_cache")["success"] is False
        assert ok(server, "POST", "/reset_prefix_cache", json={"reset_running_requests": True})["success"] is True
    ok(server, "POST", "/resume")
    meta = running.result(TIMEOUT_S)["meta_info"]
    assert meta["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert meta["num_retractions"] == (1 if mode == "keep" else 0)
    assert late.result(TIMEOUT_S)["meta_info"]["finish_reason"]["type"] == "length"


def test_abort_without_a_pause(server: ServerProcess) -> None:
    running = in_background(server, LONG, rid="long")
    assert ok(server, "POST", "/abort_requests", json={"request_ids": ["long"]})["aborted"] == 1
    assert running.result(TIMEOUT_S)["meta_info"]["finish_reason"]["type"] == "abort"


def test_skyrl_s_older_calls(server: ServerProcess, trainer: Trainer, tensors: Tensors) -> None:
    def rpc(method: str, **kwargs: Any) -> dict[str, Any]:
        return {"method": method, "kwargs": kwargs}

    new = scaled(tensors, 0.25)
    ok(server, "POST", "/collective_rpc", json=rpc("skyrl_start_weight_update", is_checkpoint_format=True))
    reply = trainer.update(new, "/collective_rpc", lambda info: rpc("update_weights_nccl", update_info=info))
    assert reply.json() == {"results": [None]}
    ok(server, "POST", "/collective_rpc", json=rpc("skyrl_finish_weight_update"))
    assert checksums(server) == expected(new)


def test_weights_come_from_a_folder_in_a_pause(server: ServerProcess, tensors: Tensors, tmp_path: Path) -> None:
    """prime-rl's order of calls: a pause that keeps requests, `weight_dir`, resume."""
    new = scaled(tensors, 0.125)
    save_file({name: tensor.contiguous() for name, tensor in new.items()}, tmp_path / "model.safetensors")
    ok(server, "POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
    ok(server, "POST", "/update_weights", json={"weight_dir": str(tmp_path)})
    ok(server, "POST", "/resume")
    assert checksums(server) == expected(new)


def test_the_calls_of_areal_refresh_every_tensor(server: ServerProcess, tensors: Tensors) -> None:
    port = free_port()
    fields = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2,
              "backend": "gloo", "group_name": "areal"}  # fmt: skip
    pool = ThreadPoolExecutor(1)
    joined = pool.submit(ok, server, "POST", "/areal_init_weights_update_group", json=fields)
    group = init_process_group("127.0.0.1", port, 0, 2, "areal", "gloo", TIMEOUT_S)
    assert joined.result(TIMEOUT_S)["success"]
    new = scaled(tensors, 1.5)
    ok(server, "POST", "/areal_pause_generation", json={})
    names = sorted(new)
    for part in (names[::2], names[1::2]):
        shapes = [list(new[name].shape) for name in part]
        meta = {"names": part, "dtypes": ["float32"] * len(part), "shapes": shapes, "group_name": "areal"}
        ok(server, "POST", "/areal_set_update_weight_meta", json=meta)
        reply = pool.submit(ok, server, "POST", "/areal_update_weights_xccl", json={})
        for name in part:
            group.finish(group.start_broadcast(new[name].contiguous()), time.monotonic() + TIMEOUT_S)
        assert reply.result(TIMEOUT_S)["success"]
    ok(server, "POST", "/areal_continue_generation", json={})
    assert checksums(server) == expected(new)
    group.destroy()

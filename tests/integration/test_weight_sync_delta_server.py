"""Deltas, disk and pulls through a real server, its client and a real gloo group."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout.client import ServerError
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from tests.skyrl_deltas import change_entry, write_delta
from weight_sync.delta.encoder import DeltaEncoder, EncodedDelta
from weight_sync.delta.frame import write_frame
from weight_sync.delta.publisher import publish_encoded
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.process_group import GroupHandle, free_port, init_process_group

pytestmark = pytest.mark.full

TIMEOUT_S = 30.0
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3, dtype="bfloat16")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, max_total_tokens=2048, weight_update_timeout=TIMEOUT_S) as running:
        yield running


@pytest.fixture
def group(server: ServerProcess) -> Iterator[GroupHandle]:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(server.client.init_weights_update_group, "127.0.0.1", port, 1, 2, "deltas")
        handle = init_process_group("127.0.0.1", port, 0, 2, "deltas", "gloo", TIMEOUT_S)
        joined.result()
    yield handle
    server.client.destroy_weights_update_group("deltas")
    handle.destroy()


def nudged(tensors: Tensors) -> Tensors:
    result = {}
    for name, tensor in tensors.items():
        words = tensor.clone().view(-1).view(torch.int16)
        words[::17] += 1
        result[name] = words.view(tensor.dtype).view(tensor.shape)
    return result


def send(server: ServerProcess, group: GroupHandle, payload: bytes) -> None:
    content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            server.client.update_weights_from_distributed,
            ["delta"],
            ["uint8"],
            [[len(payload)]],
            "deltas",
            "delta",
        )
        work = group.start_broadcast(content)
        call.result()
        work.wait()


def refresh(server: ServerProcess, group: GroupHandle, delta: EncodedDelta, payloads: list[bytes], label: str) -> None:
    body = {"weight_version": label, "base_digest": delta.base_digest}
    begun = server.http.post("/begin_weight_update", json=body)
    assert begun.status_code == 200, begun.text
    for payload in payloads:
        send(server, group, payload)
    server.client.end_weight_update()


def checksums(server: ServerProcess) -> dict[str, str]:
    return server.client.weights_checker()["checksums"]


def expected(tensors: Tensors) -> dict[str, str]:
    return {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}


def test_a_delta_by_broadcast_there_and_back(server: ServerProcess, group: GroupHandle, folder: Path) -> None:
    old = logical_tensors(folder)
    server.client.update_weights_from_disk(str(folder), "base")
    delta = DeltaEncoder(old.items(), frame_bytes=100_000).encode(nudged(old).items())
    assert len(delta.frames) > 1
    refresh(server, group, delta, delta.payloads(), "next")
    assert checksums(server) == expected(nudged(old))
    assert server.client.weights_checker()["per_engine_checksum"] == delta.digest
    refused = server.http.post("/begin_weight_update", json={"base_digest": delta.base_digest})
    assert refused.status_code == 409
    server.client.begin_weight_update("wrong")
    with pytest.raises(ServerError, match="starts from fingerprint"):
        send(server, group, delta.payloads()[0])
    server.client.abort_weight_update()
    assert checksums(server) == expected(nudged(old))
    server.client.begin_weight_update("base again")
    for frame in delta.frames:
        send(server, group, write_frame(frame.invert()))
    server.client.end_weight_update()
    assert checksums(server) == expected(old)
    assert server.client.weight_version() == "base again"


def test_disk_and_pull_over_http(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", "moe_dense_first", seed=4, dtype="bfloat16")
    assert server.client.update_weights_from_disk(str(other), "2")["weight_version"] == "2"
    assert server.client.model_info()["model_path"] == str(other)
    with pytest.raises(ServerError) as refused:
        server.client.update_weights_from_disk(str(tmp_path / "nowhere"), "3")
    assert refused.value.status_code == 400
    assert server.client.model_info()["model_path"] == str(other)
    assert server.client.weight_version() == "2"

    old = logical_tensors(folder)
    encoder = DeltaEncoder(old.items())
    publish_encoded(tmp_path / "source", 1, encoder.encode(nudged(old).items()))
    pulled = server.client.pull_weights(str(tmp_path / "local"), str(tmp_path / "source"), 1, update_memory=True)
    assert (pulled["memory"], pulled["weight_version"]) == ("full", "1")
    assert checksums(server) == expected(nudged(old))
    answer = server.http.post(
        "/pull_weights",
        json={"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path), "target_version": -1},
    )
    assert answer.status_code == 400


def skyrl(server: ServerProcess, path: str, status: int = 200, **body: object) -> str:
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.text


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def answer_of(server: ServerProcess) -> dict[str, Any]:
    """Return a greedy answer; `answer` in it is what two engines with the same weights have in common."""
    params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    reply = server.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    meta = reply.json()["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    return meta | {"answer": (reply.json()["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]])}


class Requests:
    """Sends one request after the other on a thread, while in the block; `replies` are theirs."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._stops = server, threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.replies: list[dict[str, Any]] = []

    def __enter__(self) -> Requests:
        self._ended = self._pool.submit(self._run)
        self.wait_for(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stops.set()
        self._pool.shutdown()
        self._ended.result()

    def wait_for(self, more: int) -> None:
        """Wait until this number of requests has ended from now on."""
        number, until = len(self.replies) + more, time.monotonic() + TIMEOUT_S
        while len(self.replies) < number:
            assert time.monotonic() < until and not self._ended.done()
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._stops.is_set():
            self.replies.append(answer_of(self._server))


def fetch_and_update(
    server: ServerProcess, sync: dict[str, str], number: int, before: Tensors, running: Requests
) -> None:
    """Bring a server to a version as SkyRL does: the fetch while it serves, and the update in a pause."""
    skyrl(server, "/fetch_weights", **sync, target_version=number)
    assert checksums(server) == expected(before), "a fetch changes nothing that serves"
    running.wait_for(2)
    server.http.post("/pause", params={"mode": "keep"}).raise_for_status()
    skyrl(server, "/start_weight_update", is_checkpoint_format=True)
    skyrl(server, "/update_weights", update_info={"target_version": number})
    skyrl(server, "/finish_weight_update", weight_version=str(number))
    server.http.post("/resume").raise_for_status()
    running.wait_for(2)  # the first may have begun before


def test_skyrl_fetches_while_requests_run_and_then_updates(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    """A server that starts from the same weights gives the last answers, bit for bit."""
    old = logical_tensors(folder)
    server.client.update_weights_from_disk(str(folder), "base")
    versions = [old, nudged(old), nudged(nudged(old))]
    for number in (1, 2):
        write_delta(tmp_path / "sync", number, versions[number - 1], versions[number])
    sync = {"sync_dir": str(tmp_path / "sync")}
    with Requests(server) as running:
        for number in (1, 2):
            fetch_and_update(server, sync, number, versions[number - 1], running)
            assert checksums(server) == expected(versions[number])
            assert server.client.weight_version() == str(number)
    change_entry(write_delta(tmp_path / "sync", 3, versions[2], old), checksum="0" * 32)
    assert "has checksum" in skyrl(server, "/fetch_weights", 400, **sync, target_version=3)
    assert "missing" in skyrl(server, "/fetch_weights", 400, **sync, target_version=9)
    assert checksums(server) == expected(versions[2])
    answers = answers_by_version(running.replies)
    assert list(answers) == ["base", "1", "2"] and all(len(some) == 1 for some in answers.values())
    assert not answers["base"] & answers["2"], "answers show whose weights they are"
    with ServerProcess(folder_of(folder, tmp_path / "new", versions[2]), max_total_tokens=2048) as fresh:
        assert {repr(answer_of(fresh)["answer"])} == answers["2"]


def answers_by_version(replies: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the different answers of each version, of requests that one version computed alone."""
    answers: dict[str, set[str]] = {}
    for meta in replies:
        if meta["weight_version_start"] == meta["kv_weight_version_oldest"] == meta["weight_version"]:
            answers.setdefault(meta["weight_version"], set()).add(repr(meta["answer"]))
    return answers


def folder_of(model: Path, new: Path, tensors: Tensors) -> Path:
    """Write a checkpoint of the same model with other tensors; return its folder."""
    new.mkdir()
    for file in model.glob("*.json"):
        if "index" not in file.name:
            (new / file.name).write_bytes(file.read_bytes())
    save_file(tensors, new / "model.safetensors")
    return new

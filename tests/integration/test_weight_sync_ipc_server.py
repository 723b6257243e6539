"""`/update_weights_from_ipc` on a real server, from a sender in another process: right, refused, and killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.client.errors import ServerError
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parameter_server_stand_in import Form, ParameterServerStandIn
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
ROOT = Path(__file__).resolve().parents[2]
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(root / f"m{seed}", "moe_dense_first", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[ServerProcess]:
    with ServerProcess(folders[0], max_total_tokens=4096, weight_version="v0", weight_update_timeout=15) as running:
        yield running


def logprobs(server: ServerProcess) -> tuple[str, list[float]]:
    """Return the version in force, and its log-probabilities of the output of a fixed prompt."""
    body = {"input_ids": [5, 17, 23, 42], "sampling_params": PARAMS, "return_logprob": True}
    meta = server.http.post("/generate", json=body).json()["meta_info"]
    return meta["weight_version"], [entry[0] for entry in meta["output_token_logprobs"]]


class Sender:
    """The stand-in as a process of its own, which sends a checkpoint."""

    def __init__(self, folder: Path, form: Form, stop_at: int = -1) -> None:
        command = [sys.executable, "-m", "tests.parameter_server_stand_in", str(folder), form, str(stop_at)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        self.handles: dict[str, str] = json.loads(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def send(server: ServerProcess, folder: Path, version: str, form: Form = "pickle") -> dict[str, Any]:
    sender = Sender(folder, form)
    try:
        answer = server.client.update_weights_from_ipc(sender.handles, version)
        assert sender.line() == "done"
        assert sender.process.wait(10) == 0
    finally:
        sender.kill()
    return answer


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_checkpoint_from_another_process(server: ServerProcess, folders: list[Path], form: Form) -> None:
    old = logprobs(server)
    answer = send(server, folders[1], f"v-{form}", form)
    assert answer["weight_version"] == f"v-{form}" and answer["num_tensors"] == len(logical_tensors(folders[1]))
    new = logprobs(server)
    assert new[0] == f"v-{form}" and new[1] != old[1]
    assert server.client.get_weights_by_name(NORM) == logical_tensors(folders[1])[NORM].double().tolist()
    assert send(server, folders[0], "v0", form)["weight_version"] == "v0"
    assert logprobs(server)[1] == logprobs(server)[1]


def test_with_begin_and_end_and_while_paused(server: ServerProcess, folders: list[Path]) -> None:
    server.client.begin_weight_update("v5")
    assert "weight_update" in send(server, folders[1], "v5")
    assert logprobs(server)[0] != "v5"
    assert server.client.end_weight_update()["weight_version"] == "v5"
    of_one = logprobs(server)
    server.client.pause("in_place")
    send(server, folders[2], "v6")
    assert server.client.weight_version() == "v5"
    server.client.continue_generation()
    of_two = logprobs(server)
    assert (of_one[0], of_two[0]) == ("v5", "v6") and of_one[1] != of_two[1]


def test_a_killed_sender_changes_nothing(server: ServerProcess, folders: list[Path]) -> None:
    before = logprobs(server)
    sender = Sender(folders[2] if before[0] == "v5" else folders[1], "pickle", stop_at=2)
    failures: list[ServerError] = []

    def call() -> None:
        try:
            server.client.update_weights_from_ipc(sender.handles, "never")
        except ServerError as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert sender.line() == "stopped"
    assert logprobs(server) == before, "requests are served between buckets"
    killed = time.monotonic()
    sender.kill()
    thread.join(20)
    assert not thread.is_alive() and time.monotonic() - killed < 5.0, "a dead sender is noticed at once"
    assert failures[0].status_code == 502 and "disconnected" in str(failures[0])
    assert logprobs(server) == before
    send(server, folders[1], "after")
    assert logprobs(server)[0] == "after"


def test_a_refused_tensor_changes_nothing_and_both_sides_are_told(server: ServerProcess, folders: list[Path]) -> None:
    before = logprobs(server)
    tensors = logical_tensors(folders[2])
    told: list[BaseException] = []
    with ParameterServerStandIn(1 << 17, "json", device="cpu") as stand_in:

        def update() -> None:
            try:
                stand_in.update([*tensors.items(), ("model.norm.bias", torch.zeros(4)), (NORM, torch.zeros(4))])
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=update)
        thread.start()
        with pytest.raises(ServerError) as refused:
            server.client.update_weights_from_ipc(stand_in.handles, "never")
        thread.join(20)
        assert not thread.is_alive()
    assert refused.value.status_code == 400 and "model.norm.bias" in str(refused.value)
    assert stand_in.answers[-1] != "" or told
    assert logprobs(server) == before


def test_addresses_that_are_none(server: ServerProcess) -> None:
    before = logprobs(server)
    for handles in ({}, {"GPU-0": "ipc://@x"}, {"cpu": "tcp://127.0.0.1:1"}):
        with pytest.raises(ServerError) as refused:
            server.client.update_weights_from_ipc(handles)
        assert refused.value.status_code == 400
    assert logprobs(server) == before

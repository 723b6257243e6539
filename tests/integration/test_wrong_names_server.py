"""A whole model under names that the server does not know, while others ask for its health and for an abort."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from tests.model_zoo import stored_tensors, tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.full, pytest.mark.serial]
COUNT = 31_443


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("models") / "large"
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "dtype": "bfloat16", "tie": False}
    return tiny_checkpoint(path, "moe", layers=80, experts=128, top_k=4, **sizes)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, max_total_tokens=1024, num_threads=1) as server:
        yield server


class Probe:
    """Asks for the server's health, again and again; `seconds` that each answer took."""

    def __init__(self, server: ServerProcess) -> None:
        self.seconds: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server.url,))

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(30)

    def _run(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not self._is_over.wait(0.005):
                start = time.perf_counter()
                assert http.get("/health").status_code == 200
                self.seconds.append(time.perf_counter() - start)


def cpu_seconds(server: ServerProcess) -> float:
    """Return the CPU seconds of all processes of the server."""
    total = 0.0
    for pid in (server.process.pid, *server.children()):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += sum(map(int, fields[11:13])) / 100
    return total


def test_a_manifest_of_wrong_names_holds_up_nobody(server: ServerProcess, folder: Path) -> None:
    """D1: 400 within a second of processor time, with three hints; abort and health answer meanwhile.

    What it costs is counted in processor time, as a test may share its processors; /health has five times its promise.
    """
    tensors = stored_tensors(folder)
    assert len(tensors) == COUNT
    manifest = [
        {"name": f"module.{name}", "dtype": "bfloat16", "shape": list(tensor.shape), "fingerprint": "0" * 16}
        for name, tensor in tensors.items()
    ]
    body = json.dumps({"update_id": "a", "manifest": manifest}).encode()
    answers: list[httpx.Response] = []

    def begin() -> None:
        answers.append(httpx.post(f"{server.url}/begin_weight_update", content=body, timeout=60))

    with Probe(server) as probe:
        before = cpu_seconds(server)
        sender = threading.Thread(target=begin)
        sender.start()
        time.sleep(0.05)
        start = time.perf_counter()
        aborted = server.http.post("/abort_weight_update", json={})
        abort_s = time.perf_counter() - start
        sender.join(60)
        spent = cpu_seconds(server) - before
    (refused,) = answers
    message = refused.json()["message"]
    assert refused.status_code == 400 and message.startswith(f"{COUNT} tensors are refused: ")
    assert message.count("; the nearest that it has is 'model.") + message.count("is 'lm_head.weight'") == 3
    assert len(message) < 600
    assert spent < 1.0
    assert aborted.status_code == 409 and abort_s < 1.0 + spent
    assert sorted(probe.seconds)[int(len(probe.seconds) * 0.99)] < 0.5

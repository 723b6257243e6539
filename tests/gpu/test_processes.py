"""Weights from another process on the same device: torch's CUDA handles, checkpoint-engine's buffer, a gloo group.

The engine runs in this process, the sender in its own.  In a dry run both share memory of the CPU.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from tests.gpu.engines import checkpoint, engine
from tests.gpu.needs import need_cuda
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness
from tests.tensor_sender import TensorSender
from tests.trainer_process import TrainerProcess
from weight_sync.fingerprint import fingerprint, fingerprint_hex

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [checkpoint(base / f"v{seed}", device, seed=seed) for seed in (1, 2)]


@pytest.fixture
def harness(folders: list[Path], device: torch.device) -> Harness:
    return engine(folders[0], device, weight_version="v1")


def ok(harness: Harness, verb: type, **fields: Any) -> Any:
    answer = harness.wait(harness.post(verb, **fields), WAIT_S)
    assert answer.success, answer.message
    return answer.data


def checksums(harness: Harness) -> dict[str, str]:
    return ok(harness, WeightsCheckerReqInput)["checksums"]


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}


def said(harness: Harness) -> tuple[list[int], list[float]]:
    (result,) = harness.generate([PROMPT], {"max_new_tokens": 12}, extra_key=f"k{harness._count}")
    return result.token_ids, result.logprobs


def fresh(folder: Path, device: torch.device) -> tuple[list[int], list[float]]:
    return said(engine(folder, device))


@pytest.mark.parametrize(("form", "staging"), [("list", "host"), ("flattened", "device")])
def test_tensors_by_their_handles(
    form: str, staging: str, folders: list[Path], device: torch.device, tmp_path: Path
) -> None:
    """Tensors come by handle, as slime and verl send them; the sender's memory goes back afterwards."""
    new, harness = logical_tensors(folders[1]), engine(folders[0], device, weight_staging=staging)
    sender = TensorSender(new, tmp_path, device=str(device))
    try:
        said(harness)
        ok(harness, BeginWeightUpdateReqInput, weight_version="v2")
        names = sorted(new)
        for part in (names[::2], names[1::2]):
            payload = bytearray(base64.b64decode(sender.payload(form, part)))
            load_format = "flattened_bucket" if form == "flattened" else None
            ok(harness, UpdateWeightsFromTensorReqInput, payload=payload, load_format=load_format)
        sender.let_go()
        ok(harness, EndWeightUpdateReqInput)
    finally:
        sender.close()
    assert checksums(harness) == expected(new)
    assert said(harness) == fresh(folders[1], device)


class CheckpointEngine:
    """The stand-in for checkpoint-engine's server as a process of its own, its buffer on the device."""

    def __init__(self, folder: Path, device: torch.device, stop_at: int = -1) -> None:
        command = [sys.executable, "-m", "tests.parameter_server_stand_in", str(folder), "pickle", str(stop_at)]
        self._process = subprocess.Popen([*command, device.type], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.handles: dict[str, str] = json.loads(self.line())

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


def test_checkpoint_engine_s_buffer(harness: Harness, folders: list[Path], device: torch.device) -> None:
    sender = CheckpointEngine(folders[1], device)
    try:
        ok(harness, UpdateWeightsFromIPCReqInput, zmq_handles=sender.handles, weight_version="v2")
        assert sender.line() == "done"
    finally:
        sender.kill()
    assert checksums(harness) == expected(logical_tensors(folders[1]))
    assert said(harness) == fresh(folders[1], device)


def test_a_sender_that_dies_changes_nothing(folders: list[Path], device: torch.device) -> None:
    harness = engine(folders[0], device, weight_version="v1", weight_update_timeout=5.0)
    before = said(harness)
    sender = CheckpointEngine(folders[1], device, stop_at=1)
    try:
        asked = harness.post(UpdateWeightsFromIPCReqInput, zmq_handles=sender.handles, weight_version="v2")
        harness.tick()
        assert sender.line() == "stopped"
    finally:
        sender.kill()
    assert not harness.wait(asked, WAIT_S).success
    assert ok(harness, GetStateReqInput)["weight_version"] == "v1"
    assert checksums(harness) == expected(logical_tensors(folders[0]))
    assert said(harness) == before


@pytest.fixture
def trainer(folders: list[Path], tmp_path: Path) -> Iterator[TrainerProcess]:
    process = TrainerProcess(logical_tensors(folders[1]), tmp_path)
    yield process
    process.close()


def test_a_gloo_group_of_two_processes(
    harness: Harness, trainer: TrainerProcess, folders: list[Path], device: torch.device
) -> None:
    trainer.wait_ready()
    ok(harness, InitWeightsUpdateGroupReqInput, **trainer.join_fields())
    ok(harness, BeginWeightUpdateReqInput, weight_version="v2")
    names = sorted(trainer.tensors)
    for part in (names[::2], names[1::2]):
        ok(harness, UpdateWeightsFromDistributedReqInput, **trainer.send(part))
    ok(harness, EndWeightUpdateReqInput)
    assert checksums(harness) == expected(trainer.tensors)
    assert said(harness) == fresh(folders[1], device)


def test_memory_is_not_shared_by_expandable_segments(device: torch.device) -> None:
    """Handles of such memory cannot be opened by torch's reductions; the runner turns them off."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    assert device.type == "cpu" or "expandable_segments:True" not in settings


def test_two_processes_sum_in_memory_that_both_see(device: torch.device, tmp_path: Path) -> None:
    """The sum of two ranks as one kernel, also captured and replayed; NCCL does not put two ranks on one device."""
    need_cuda(device, "memory of a device that two processes see")
    words = [sys.executable, "-m", "tests.gpu.peer_sums"]
    ranks = [
        subprocess.Popen([*words, str(rank), "2", str(tmp_path / "store")], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=WAIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)[-4000:]

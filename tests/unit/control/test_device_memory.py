"""Sleep and wake of a real scheduler whose released memory is not there, as on CUDA."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import BeginWeightUpdateReqInput
from rollout.engine import build
from rollout.memory.host_pages import HostPages, MemoryTakenError, Span
from tests.kernels import native_ops
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.unit.control.test_scheduler_memory import ALL, answers, memory, refusal, release, resume, storages
from weight_sync.unnamed_file import UnnamedFile


class AbsentPages(HostPages):
    """Pages whose released bytes are 0xFF until they are provided.

    `was_touched`: bytes were written while they were released, which would fault on CUDA.  `is_full`: other processes
    hold the memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.absent: set[Span] = set()
        self.pools: list[str] = []
        self.is_full, self.was_touched = False, False

    def pool(self, tag: str) -> Any:
        self.pools.append(tag)
        return super().pool(tag)

    def discard(self, spans: Sequence[Span]) -> None:
        for span in spans:
            for part in self.read(span):
                part[:] = b"\xff" * len(part)
        self.absent.update(spans)

    def provide(self, spans: Sequence[Span]) -> None:
        if self.is_full and self.absent.intersection(spans):
            raise MemoryTakenError("others hold it")
        for span in self.absent.intersection(spans):
            for part in self.read(span):
                self.was_touched = self.was_touched or bytes(part).count(0xFF) != len(part)
                part[:] = bytes(len(part))
        self.absent.difference_update(spans)

    def is_provided(self, spans: Sequence[Span]) -> bool:
        return not self.absent.intersection(spans)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    native_ops()
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2)]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> AbsentPages:
    made = AbsentPages()
    monkeypatch.setattr(build, "select_pages", lambda device: made)
    return made


def engine(folder: Path, **settings: Any) -> Harness:
    return Harness(folder, weight_version="v1", enable_memory_saver=True, **settings)


def test_the_orders_of_slime_and_verl(folders: list[Path], pages: AbsentPages) -> None:
    """Both release all memory, resume the weights, refresh them, and resume the rest."""
    harness = engine(folders[0])
    assert pages.pools == ["weights", "kv_cache"]
    addresses = storages(harness)
    harness.control(PauseGenerationReqInput, mode="abort")
    assert release(harness).data["released"] == ALL and pages.absent
    assert resume(harness, "weights").success
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    assert harness.control(ContinueGenerationReqInput).success
    assert "released (kv_cache)" in refusal(harness)
    assert resume(harness, "kv_cache", "cuda_graph").success and not pages.absent
    assert answers(harness) == answers(Harness(folders[1], weight_version="v1"))
    assert storages(harness) == addresses
    assert not pages.was_touched
    harness.check_idle()


def test_a_refresh_before_the_weights_are_resumed_is_refused(folders: list[Path], pages: AbsentPages) -> None:
    harness = engine(folders[0])
    assert release(harness).success
    answer = harness.control(BeginWeightUpdateReqInput, weight_version="v2")
    assert not answer.success and answer.status_code == 409 and "resume_memory_occupation" in answer.message
    assert memory(harness)["weights"] == "released"
    assert resume(harness).success and refresh(harness, logical_tensors(folders[1]), "v2").success
    assert not pages.was_touched
    assert answers(harness) == answers(Harness(folders[1], weight_version="v1"))


def test_memory_that_others_hold_is_a_503_and_stays_released(folders: list[Path], pages: AbsentPages) -> None:
    harness = engine(folders[0], enable_weights_cpu_backup=True)
    old = answers(harness)
    assert release(harness).success
    pages.is_full = True
    answer = resume(harness)
    assert not answer.success and answer.status_code == 503 and "others hold it" in answer.message
    assert memory(harness) == {"weights": "released", "kv_cache": "released", "cuda_graph": "released"}
    pages.is_full = False
    assert resume(harness).success
    assert answers(harness) == old and not pages.was_touched


def test_a_damaged_copy_leaves_the_memory_to_others(folders: list[Path], pages: AbsentPages) -> None:
    harness = engine(folders[0], enable_weights_cpu_backup=True)
    assert release(harness, "weights").success
    with mock.patch.object(UnnamedFile, "read", side_effect=OSError("it is damaged")):
        answer = resume(harness, "weights")
    assert not answer.success and "damaged" in answer.message
    assert memory(harness)["weights"] == "released" and pages.absent
    assert resume(harness).success and memory(harness)["weights"] == "awaiting_refresh"
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    assert answers(harness) == answers(Harness(folders[1], weight_version="v1"))


@pytest.mark.mutant
def test_memory_that_is_used_before_it_is_there_is_noticed(
    folders: list[Path], pages: AbsentPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong engine stages an update where the weights were, although that memory is released."""
    monkeypatch.setattr(AbsentPages, "is_provided", lambda self, spans: True)
    harness = engine(folders[0])
    assert release(harness).success
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    resume(harness)
    assert pages.was_touched or pages.absent


def test_updates_are_received_on_a_stream_of_their_own(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the I/O thread uses that stream; steps keep their own."""
    given: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        "rollout.control.io_thread.use_own_stream",
        lambda device: given.append((threading.current_thread().name, device)),
    )
    harness = Harness(folders[0], weight_version="v1")
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    assert given == [("weight-io_0", torch.device("cpu"))]

"""The I/O thread of weight verbs has a low priority next to steps, and that of any thread otherwise."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from rollout.control import io_thread
from rollout.control.io_thread import IoThread, give_way
from rollout.control.weight_sources import SOURCES
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.update import WeightUpdate

CPU = torch.device("cpu")
WAIT_S = 30.0


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.fixture
def own() -> int:
    """The niceness of the threads that do not give way."""
    return niceness()


def answer(future: Future[int]) -> int:
    return future.result(WAIT_S)


def test_work_gives_way_to_steps_and_the_next_without_steps_does_not(own: int) -> None:
    thread = IoThread(CPU)
    order = [(False, own), (True, 15), (True, 15), (False, own), (False, own)]
    assert [answer(thread.submit(niceness, gives_way=gives_way)) for gives_way, _ in order] == [it for _, it in order]


def test_work_that_gives_way_while_it_runs_is_followed_by_another_thread(own: int) -> None:
    thread = IoThread(CPU)

    def work() -> int:
        give_way()
        give_way()
        return niceness()

    assert answer(thread.submit(work, gives_way=False)) == 15
    assert answer(thread.submit(niceness, gives_way=False)) == own


def test_work_that_fails_is_remembered_too(own: int) -> None:
    thread = IoThread(CPU)

    def work() -> int:
        give_way()
        raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        answer(thread.submit(work, gives_way=False))
    assert answer(thread.submit(niceness, gives_way=False)) == own


def test_threads_that_it_starts_give_way_as_it_does(own: int) -> None:
    def start() -> int:
        found: list[int] = []
        started = threading.Thread(target=lambda: found.append(niceness()))
        started.start()
        started.join(WAIT_S)
        return found[0]

    thread = IoThread(CPU)
    assert answer(thread.submit(start, gives_way=True)) == 15
    assert answer(thread.submit(start, gives_way=False)) == own


def test_on_a_device_one_thread_keeps_its_stream_and_always_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[torch.device] = []
    monkeypatch.setattr(io_thread, "use_own_stream", settled.append)
    device = torch.device("meta")
    thread = IoThread(device)
    assert [answer(thread.submit(niceness, gives_way=gives_way)) for gives_way in (False, True, False)] == [15] * 3
    assert settled == [device]


def test_other_threads_do_not_give_way(own: int) -> None:
    give_way()
    assert niceness() == own


# --- an engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / f"v{seed}", seed=seed, context_length=8192) for seed in (1, 2)]


@pytest.fixture
def trainer(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackTrainer]:
    trainer = LoopbackTrainer(logical_tensors(folders[1]))
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    yield trainer


def test_an_engine_receives_eagerly_until_requests_run(
    folders: list[Path], trainer: LoopbackTrainer, monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    """Each of three refreshes is noted as it takes its tensors, and as it is verified."""
    found: list[int] = []
    take, verify = WeightUpdate._take, WeightUpdate.verify
    monkeypatch.setattr(WeightUpdate, "_take", lambda *args, **more: (found.append(niceness()), take(*args, **more)))
    monkeypatch.setattr(WeightUpdate, "verify", lambda *args: (found.append(niceness()), verify(*args)))
    harness = Harness(folders[0], weight_version="v1", max_total_tokens=8192)

    def refresh(label: str) -> set[int]:
        found.clear()
        assert harness.control(BeginWeightUpdateReqInput, weight_version=label, update_id=label).success
        assert trainer.send(harness, None, label, update_id=label).success
        assert harness.control(EndWeightUpdateReqInput, update_id=label).success
        return set(found)

    assert refresh("idle") == {own}
    harness.submit([3, 1, 4], params={"max_new_tokens": 8000, "ignore_eos": True}, rid="running")
    harness.tick()
    assert harness.scheduler.has_work and refresh("busy") == {15}
    harness.scheduler.abort(None)
    harness.run()
    assert refresh("idle again") == {own}

"""A call that is refused before anything of it is received: its sender is notified and holds nothing for it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from safetensors.torch import save

from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.weights import UpdateWeightsFromTensorReqInput
from tests.late_loop import loop  # noqa: F401
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.errors import StagingError
from weight_sync.known_calls import without_collections
from weight_sync.transaction import WeightTransaction
from weight_sync.updater import WeightUpdater


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


@pytest.fixture
def shared(folder: Path) -> Iterator[SharedMemory]:
    """Yield shared memory that holds all tensors as a safetensors file."""
    content = save(logical_tensors(folder))
    shared = SharedMemory(f"lockstep_{os.getpid()}", create=True, size=len(content))
    shared.buf[: len(content)] = content
    yield shared
    shared.close()


def send(engine: Harness, shared: SharedMemory) -> ControlReqOutput:
    return engine.control(
        UpdateWeightsFromTensorReqInput,
        format="safetensors",
        shm_name=shared.name,
        shm_bytes=shared.size,
        shm_unlink=True,
    )


def is_there(shared: SharedMemory) -> bool:
    return Path("/dev/shm", shared.name).exists()


def no_room(*_: object, **__: object) -> None:
    raise StagingError("there is no room")


def test_a_call_for_which_no_update_can_be_opened_lets_go_of_its_content(
    folder: Path, shared: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Harness(folder)
    monkeypatch.setattr(WeightUpdater, "open_implicit", no_room)
    assert is_there(shared)
    answer = send(engine, shared)
    assert not answer.success and answer.message == "there is no room"
    assert not is_there(shared)


@pytest.mark.parametrize("too_few", [0, 1])
def test_the_bytes_of_a_call_are_capped(folder: Path, shared: SharedMemory, too_few: int) -> None:
    num_bytes = sum(tensor.nbytes for tensor in logical_tensors(folder).values())
    answer = send(Harness(folder, max_weight_call_bytes=num_bytes - too_few), shared)
    assert answer.success == (not too_few), answer.message
    assert not too_few or f"has {num_bytes} bytes of tensors; the limit is {num_bytes - 1}" in answer.message
    assert not is_there(shared)


def test_a_failed_call_holds_no_content_until_the_next_cycle_search(
    folder: Path, shared: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error holds frames, and these the call's content: no frame may hold the error in turn."""

    errors: list[weakref.ref[StagingError]] = []

    class NoRoom(StagingError):
        def __init__(self) -> None:
            super().__init__("there is no room")
            errors.append(weakref.ref(self))

    def fail(*_: object, **__: object) -> None:
        raise NoRoom

    engine = Harness(folder)
    monkeypatch.setattr(WeightTransaction, "receive", fail)
    gc.collect()
    with without_collections():
        answer = send(engine, shared)
        assert not answer.success and answer.message == "there is no room"
        assert [error() for error in errors] == [None]

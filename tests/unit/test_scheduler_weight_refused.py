"""A call that is refused before anything of it is received: its sender is told, and holds nothing for it any more."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from safetensors.torch import save

from rollout.core.weight_io_struct import UpdateWeightsFromTensorReqInput
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.errors import StagingError
from weight_sync.updater import WeightUpdater


def no_room(*_: object) -> None:
    raise StagingError("there is no room")


def test_a_call_for_which_no_update_can_be_opened_lets_go_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path)
    engine = Harness(folder)
    monkeypatch.setattr(WeightUpdater, "open_implicit", no_room)
    content = save(logical_tensors(folder))
    shared = SharedMemory(create=True, size=len(content))
    try:
        shared.buf[: len(content)] = content
        answer = engine.control(
            UpdateWeightsFromTensorReqInput,
            format="safetensors",
            shm_name=shared.name,
            shm_bytes=len(content),
            shm_unlink=True,
        )
        assert not answer.success and answer.message == "there is no room"
        with pytest.raises(FileNotFoundError):
            SharedMemory(shared.name)
    finally:
        shared.close()

"""Labels of updates: any text may be followed by content without a label, and a call that is refused renames nothing.

A real scheduler; tensors are handed in where a process group would deliver them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.control.weight_commit import successor
from rollout.core.messages.io_struct import ContinueGenerationReqInput, GetStateReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightVersionReqInput,
)
from tests.loopback_refresh import LoopbackTrainer
from tests.scheduler_harness import Harness


@pytest.fixture
def harness(folders: list[Path]) -> Harness:
    return Harness(folders[0], weight_version="v1")


def label(harness: Harness) -> str:
    return harness.scheduler.runner.state.epoch.weight_version


def some(trainer: LoopbackTrainer) -> list[str]:
    return sorted(trainer.tensors)[::3]


# "²" is a digit to `str.isdigit` and not to `int`, which also refuses more than 4300 digits.
@pytest.mark.parametrize("version", ["1+²", "1+" + "9" * 5000], ids=["superscript", "5000 digits"])
def test_content_without_a_label_follows_one_of_any_text(
    harness: Harness, trainer: LoopbackTrainer, version: str
) -> None:
    """The commit asks for the next label when the content is in memory, so that an error would end the server."""
    assert harness.control(UpdateWeightVersionReqInput, new_version=version).success
    assert harness.control(PauseGenerationReqInput).success
    continued = harness.control(ContinueGenerationReqInput)
    assert continued.success, continued.message
    refreshed = trainer.send(harness)
    assert refreshed.success and label(harness) == f"{version}+1", refreshed.message


def test_labels_without_a_sender_count_up() -> None:
    assert [successor(each) for each in ("7", "7+1", "7+9", "+1", "7+-1")] == ["7+1", "7+2", "7+10", "+2", "7+-1+1"]


def test_a_late_bucket_does_not_rename_a_verified_update(harness: Harness, trainer: LoopbackTrainer) -> None:
    assert harness.control(BeginWeightUpdateReqInput).success
    assert trainer.send(harness).success
    assert harness.control(EndWeightUpdateReqInput, phase="verify").success
    late = trainer.send(harness, some(trainer), "9")
    assert late.status_code == 409 and "verified" in late.message
    assert harness.control(GetStateReqInput).data["weight_update"]["weight_version"] is None
    assert harness.control(EndWeightUpdateReqInput, phase="commit").success
    assert label(harness) == "v1+1"

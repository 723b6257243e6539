"""Folders that change while they are read, and folders that nobody may name."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from rollout.core.io_struct import ControlReqOutput
from rollout.core.weight_io_struct import UpdateWeightsFromDiskReqInput
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.unit.test_scheduler_weight_disk import holds
from weight_sync import checkpoint_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    base = tmp_path_factory.mktemp("models")
    return tuple(tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2, 3))


def overwritten(target: Path, other: Path) -> None:
    """As `cp` does: the same files, written anew."""
    for file in other.glob("*.safetensors"):
        content = file.read_bytes()
        with open(target / file.name, "r+b") as opened:
            opened.write(content)


def swapped(target: Path, other: Path) -> None:
    """As `rsync` does: new files under the old names, with the old times."""
    for file in other.glob("*.safetensors"):
        aside = target / f".{file.name}"
        shutil.copy2(file, aside)
        aside.replace(target / file.name)


def one_file_removed(target: Path, _: Path) -> None:
    sorted(target.glob("*.safetensors"))[-1].unlink()


@pytest.mark.parametrize("change", [overwritten, swapped, one_file_removed])
@pytest.mark.parametrize("after", [1, 40, 79])
def test_w26_a_folder_that_changes_while_it_is_read_is_refused(
    folders: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, after: int
) -> None:
    """A writer comes after so many tensors: no mixture is committed, and the next load of the folder is a good one."""
    harness = Harness(folders[0], weight_version="v1")
    target = Path(shutil.copytree(folders[1], tmp_path / "target"))
    read, count = checkpoint_folder.read_tensor, 0

    def read_and_be_overtaken(*args):
        nonlocal count
        count += 1
        if count == after:
            writer = threading.Thread(target=change, args=(target, folders[2]))
            writer.start()
            writer.join()
        return read(*args)

    monkeypatch.setattr(checkpoint_folder, "read_tensor", read_and_be_overtaken)
    answer = load(harness, target)
    assert answer.status_code == 400 and "changed while" in answer.message, answer.message
    assert holds(harness, logical_tensors(folders[0]))
    if change is not one_file_removed:
        assert load(harness, target).success
        assert holds(harness, logical_tensors(folders[2]))


def load(harness: Harness, folder: Path) -> ControlReqOutput:
    return harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folder), weight_version="v2")

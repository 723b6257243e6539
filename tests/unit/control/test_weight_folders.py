"""Folders that change while they are read, and folders that no caller may name."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.weights import PullWeightsReqInput, UpdateWeightsFromDiskReqInput
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.unit.control.test_weight_disk import holds
from weight_sync.delta.version_dir import version_path
from weight_sync.receivers import disk


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    base = tmp_path_factory.mktemp("models")
    return tuple(tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2, 3))


def overwritten(target: Path, other: Path) -> None:
    """Write the same files anew, as `cp` does."""
    for file in other.glob("*.safetensors"):
        content = file.read_bytes()
        with open(target / file.name, "r+b") as opened:
            opened.write(content)


def swapped(target: Path, other: Path) -> None:
    """Put new files under the old names, with the old times, as `rsync` does."""
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
    """A writer comes after `after` parts: no mixture is committed, and the next load of the folder is a good one."""
    harness = Harness(folders[0], weight_version="v1")
    target = Path(shutil.copytree(folders[1], tmp_path / "target"))
    read, count = disk.read_into, 0
    monkeypatch.setattr(disk, "PART_BYTES", 1)  # a tensor is a part

    def read_and_be_overtaken(*args):
        nonlocal count
        count += 1
        if count == after:
            writer = threading.Thread(target=change, args=(target, folders[2]))
            writer.start()
            writer.join()
        return read(*args)

    monkeypatch.setattr(disk, "read_into", read_and_be_overtaken)
    answer = load(harness, target)
    assert answer.status_code == 400 and "changed while" in answer.message, answer.message
    assert holds(harness, logical_tensors(folders[0]))
    if change is not one_file_removed:
        assert load(harness, target).success
        assert holds(harness, logical_tensors(folders[2]))


def load(harness: Harness, folder: Path) -> ControlReqOutput:
    return harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folder), weight_version="v2")


# --- W14: which folders, which files ----------------------------------------------------------------------------------

STRANGERS = ("authorized_keys", "run.sh", "README.md", ".netrc", "notes.txt")


@pytest.fixture
def source(folders: tuple[Path, ...], tmp_path: Path) -> Path:
    """A folder whose version 1 is full and also holds files that belong to no checkpoint."""
    version = Path(shutil.copytree(folders[1], version_path(tmp_path / "source", 1)))
    for name in (*STRANGERS, "merges.txt", "tokenizer.model"):
        (version / name).write_text("x")
    return version.parent


def pull(harness: Harness, local: Path, source: Path) -> ControlReqOutput:
    return harness.control(
        PullWeightsReqInput, local_checkpoint_dir=str(local), source_dir=str(source), target_version=1
    )


def test_w14_a_pull_copies_the_files_of_a_checkpoint_and_no_others(
    folders: tuple[Path, ...], source: Path, tmp_path: Path
) -> None:
    answer = pull(Harness(folders[0]), tmp_path / "local", source)
    assert answer.success, answer.message
    found = {file.name for file in (tmp_path / "local").iterdir() if file.is_file()}
    assert found == {file.name for file in version_path(source, 1).iterdir()} - set(STRANGERS)
    assert {"config.json", "merges.txt", "tokenizer.model"} <= found


def test_w14_without_a_key_a_pull_writes_to_scratch_or_beside_the_model(
    folders: tuple[Path, ...], source: Path, tmp_path: Path
) -> None:
    outside = Path.home() / "lockstep-test-w14" / "local"
    linked = tmp_path / "link"
    linked.symlink_to(Path.home())
    try:
        for local in (outside, linked / "lockstep-test-w14" / "local", tmp_path / ".ssh", tmp_path / ".a" / "b"):
            answer = pull(Harness(folders[0]), local, source)
            assert answer.status_code == 400 and "--weight-folders" in answer.message, answer.message
            assert not local.exists() and not outside.parent.exists()
        assert pull(Harness(folders[0], admin_api_key="k"), outside, source).success
    finally:
        shutil.rmtree(outside.parent, ignore_errors=True)
    assert pull(Harness(folders[0]), folders[0].parent / "beside", source).success


def test_w14_weight_folders_are_all_that_may_be_named(folders: tuple[Path, ...], source: Path, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    inside = Path(shutil.copytree(folders[1], allowed / "inside"))
    harness = Harness(folders[0], weight_folders=f"{allowed}:{tmp_path / 'other'}", api_key="k")
    for refused in (load(harness, folders[1]), load(harness, allowed / ".." / "source"), pull(harness, inside, source)):
        assert refused.status_code == 400 and "--weight-folders" in refused.message, refused.message
    assert load(harness, inside).success
    assert load(harness, folders[0]).success  # the model that it was started with
    shutil.copytree(source, allowed / "source")
    assert "is outside the folders of" in pull(harness, tmp_path / "local", allowed / "source").message
    assert pull(harness, allowed / "local", allowed / "source").success

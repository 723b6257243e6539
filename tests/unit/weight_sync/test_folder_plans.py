"""Folders by plans: headers that are known are not parsed, and only what is wanted of a file is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.delta_models import Tensors, same_bits
from tests.logical_weights_fake import EMBED, NORM, E, FakeWeights, expert_name, fused, version
from tests.published_versions import write_checkpoint
from weight_sync import plan as plan_module
from weight_sync.errors import ContentError, CoverageError, DtypeMismatchError, WeightSyncError
from weight_sync.receivers import disk
from weight_sync.receivers.disk import DiskSource
from weight_sync.safetensors_file import RawHeader
from weight_sync.staging import StagingMode
from weight_sync.updater import WeightUpdater

PART_BYTES = 60


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut files into several parts."""
    monkeypatch.setattr(disk, "PART_BYTES", PART_BYTES)


@pytest.fixture
def weights() -> FakeWeights:
    return FakeWeights(seed=9)


def updater_of(weights: FakeWeights, staging: StagingMode = "host") -> WeightUpdater:
    return WeightUpdater(weights, device="cpu", timeout_s=5.0, vote=lambda mine: mine, staging=staging)


@pytest.fixture
def updater(weights: FakeWeights) -> WeightUpdater:
    return updater_of(weights)


def refresh(updater: WeightUpdater, folder: Path, names: list[str] | None = None) -> None:
    complete = names is None
    calls = updater.model.known_calls
    source = DiskSource(folder, updater.weights, complete=complete, timeout_s=1.0, known_calls=calls, names=names)
    updater.open_implicit("full" if complete else "partial")
    try:
        updater.receive(source)
    except WeightSyncError:
        updater.abort()
        raise
    updater.verify()
    updater.commit()


def folder_of(path: Path, tensors: Tensors, num_files: int = 2) -> Path:
    names = list(tensors)
    return write_checkpoint(path, tensors, tuple(tuple(names[part::num_files]) for part in range(num_files)))


def held(weights: FakeWeights) -> Tensors:
    return {name: weights.read(name).clone() for name in weights.metas()}


@pytest.fixture
def parsed() -> Iterator[mock.Mock]:
    """Count the headers that are parsed."""
    with mock.patch.object(RawHeader, "parse", autospec=True, side_effect=RawHeader.parse) as counted:
        yield counted


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("staging", ["host", "in_place", "journal"])
def test_folders_of_one_form_are_parsed_and_planned_once(
    tmp_path: Path, weights: FakeWeights, parsed: mock.Mock, num_files: int, staging: StagingMode
) -> None:
    updater = updater_of(weights, staging)
    made, checked = plan_module.plan_bucket, disk.check_against_model
    with (
        mock.patch.object(plan_module, "plan_bucket", side_effect=made) as plans,
        mock.patch.object(disk, "check_against_model", side_effect=checked) as checks,
    ):
        for seed in (1, 2, 3):
            refresh(updater, folder_of(tmp_path / str(seed), version(seed), num_files))
            assert same_bits(held(weights), version(seed))
            if seed == 1:
                first = plans.call_count
        assert (parsed.call_count, checks.call_count, plans.call_count) == (num_files, 1, first)
    assert first > num_files


def other_dtype(tensors: Tensors) -> Tensors:
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", [other_dtype, fused])
def test_a_folder_of_another_form_is_parsed(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater, form: type
) -> None:
    refresh(updater, folder_of(tmp_path / "1", version(1), 1))
    refresh(updater, folder_of(tmp_path / "2", form(version(2)), 1))
    assert same_bits(held(weights), version(2))


def exchange_names(file: Path, one: str, other: str) -> None:
    """Give two tensors of one size each other's place in a file: its header differs in nothing else."""
    content = file.read_bytes()
    for old, new in ((one, "-"), (other, one), ("-", other)):
        content = content.replace(f'"{old}"'.encode(), f'"{new}"'.encode())
    file.write_bytes(content)


def test_names_that_changed_places_are_seen(tmp_path: Path, weights: FakeWeights, updater: WeightUpdater) -> None:
    one, other = expert_name(0, "gate_proj"), expert_name(1, "gate_proj")
    refresh(updater, folder_of(tmp_path / "1", version(1), 1))
    folder = folder_of(tmp_path / "2", version(2), 1)
    exchange_names(folder / "model.safetensors", one, other)
    refresh(updater, folder)
    assert same_bits(held(weights), version(2) | {one: version(2)[other], other: version(2)[one]})


def test_a_digest_that_does_not_see_the_header_is_noticed(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong variant: all headers have one digest."""
    monkeypatch.setattr(RawHeader, "digest", b"always the same")
    refresh(updater, folder_of(tmp_path / "1", version(1), 1))
    with pytest.raises((AssertionError, ContentError)):
        refresh(updater, folder_of(tmp_path / "2", other_dtype(version(2)), 1))
        assert same_bits(held(weights), version(2))


def test_a_known_index_is_read_with_the_headers_that_are_there(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater
) -> None:
    """Two folders with the same index, and tensors of other dtypes in their files."""
    refresh(updater, folder_of(tmp_path / "1", version(1)))
    refresh(updater, folder_of(tmp_path / "2", other_dtype(version(2))))
    assert same_bits(held(weights), version(2))


@pytest.mark.parametrize("damage", ["shortened", "lengthened", "a file is gone", "a tensor is gone", "nan", "integers"])
def test_a_known_folder_is_checked_all_the_same(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater, damage: str
) -> None:
    refresh(updater, folder_of(tmp_path / "1", version(1)))
    tensors = {name: tensor.clone() for name, tensor in version(2).items()}
    if damage == "nan":
        tensors[NORM][1] = torch.nan
    elif damage == "integers":
        tensors[NORM] = tensors[NORM].to(torch.int32)
    elif damage == "a tensor is gone":
        del tensors[EMBED]
    folder = folder_of(tmp_path / "2", tensors)
    file = sorted(folder.glob("*.safetensors"))[-1]
    if damage in ("shortened", "lengthened"):
        content = file.read_bytes()
        file.write_bytes(content[:-4] if damage == "shortened" else content + b"0000")
    elif damage == "a file is gone":
        file.unlink()
    errors = {"a tensor is gone": CoverageError, "integers": DtypeMismatchError}
    with pytest.raises(errors.get(damage, WeightSyncError)):
        refresh(updater, folder)
    assert same_bits(held(weights), version(1))


def test_only_the_tensors_that_are_wanted_are_read(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater
) -> None:
    """Tensors between them in the file are not read either."""
    refresh(updater, folder_of(tmp_path / "1", version(1), 1))
    folder = folder_of(tmp_path / "2", version(2), 1)
    names = [expert_name(number, "gate_proj") for number in range(0, E, 2)]
    for _ in range(2):
        with mock.patch.object(disk, "read_into", side_effect=disk.read_into) as reads:
            refresh(updater, folder, names)
        wanted = sum(version(2)[name].nbytes for name in names)
        assert sum(call.args[3].numel() for call in reads.call_args_list) == wanted
    assert same_bits(held(weights), version(1) | {name: version(2)[name] for name in names})


def test_the_same_folder_for_other_names_is_another_call(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater
) -> None:
    refresh(updater, folder_of(tmp_path / "1", version(1), 1))
    folder = folder_of(tmp_path / "2", version(2), 1)
    refresh(updater, folder, [EMBED])
    refresh(updater, folder, [NORM])
    assert same_bits(held(weights), version(1) | {name: version(2)[name] for name in (EMBED, NORM)})

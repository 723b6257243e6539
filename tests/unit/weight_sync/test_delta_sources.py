"""Disk and delta sources through a real updater: bit-exact, all or nothing, and every fence refuses."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.delta_models import Tensors, same_bits
from tests.logical_weights_fake import EMBED, LM_HEAD, NORM, FakeWeights, fused, version
from tests.published_versions import write_checkpoint
from weight_sync.delta.durable import locked
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.frame import write_frame
from weight_sync.delta.local_checkpoint import pull
from weight_sync.delta.local_state import LOCK_FILE, SYNC_FOLDER, LocalState, LocalVersion, write_state
from weight_sync.delta.publisher import publish_bytes
from weight_sync.errors import (
    BaseMismatchError,
    ContentError,
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    TransactionStateError,
    UnknownTensorError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.receivers.base import BucketSource
from weight_sync.receivers.delta import DeltaSource
from weight_sync.receivers.disk import DiskSource
from weight_sync.tensor_meta import TensorMeta
from weight_sync.updater import WeightUpdater

torch.set_num_threads(1)


@pytest.fixture
def weights() -> FakeWeights:
    return FakeWeights(seed=1)


@pytest.fixture
def updater(weights: FakeWeights) -> WeightUpdater:
    return WeightUpdater(weights, device="cpu", timeout_s=5.0, vote=lambda mine: mine)


def refresh(updater: WeightUpdater, source: BucketSource, coverage: str = "full") -> None:
    """Refresh as the engine does for a call that is a refresh of its own."""
    updater.open_implicit(coverage)  # type: ignore[arg-type]
    try:
        updater.receive(source)
    except WeightSyncError:
        updater.abort()
        raise
    updater.verify()
    updater.commit()


def held(weights: FakeWeights) -> Tensors:
    return {name: weights.read(name).clone() for name in weights.metas()}


def in_one_file(folder: Path, tensors: Tensors) -> Path:
    return write_checkpoint(folder, tensors, (tuple(tensors),))


# --- disk ---------------------------------------------------------------------------------------------------------


def disk(path: Path, weights: FakeWeights, complete: bool = True) -> DiskSource:
    return DiskSource(path, weights, complete=complete, timeout_s=0.2)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_becomes_the_weights(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater, shards: int
) -> None:
    new = version(2)
    names = list(new)
    folder = write_checkpoint(tmp_path / "new", new, tuple(tuple(names[part::shards]) for part in range(shards)))
    refresh(updater, disk(folder, weights))
    assert same_bits(held(weights), new)


def test_other_forms_of_the_same_checkpoint(tmp_path: Path, weights: FakeWeights, updater: WeightUpdater) -> None:
    """Fused experts, another floating-point dtype, a tied head beside the embedding."""
    new = version(2)
    forms = {name: tensor.to(torch.float32) for name, tensor in fused(new).items()}
    forms[LM_HEAD] = forms[EMBED].clone()
    refresh(updater, disk(in_one_file(tmp_path / "new", forms), weights))
    assert same_bits(held(weights), new)


def _drop(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path)

    return damage


def _put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        save_file(load_file(path) | {name: tensor}, path)

    return damage


def _duplicate_key(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"model.norm.weight":{', b'"model.norm.weighT":{', 1))


def _huge_header(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DISK_FAULTS: dict[str, tuple[Callable[[Path], object], type[WeightSyncError], str]] = {
    "missing tensor": (_drop(NORM), CoverageError, "missing"),
    "unknown tensor": (_put("stranger", torch.zeros(2)), UnknownTensorError, "stranger"),
    "wrong shape": (_put(NORM, torch.zeros(5)), ShapeMismatchError, NORM),
    "wrong kind": (_put(NORM, torch.zeros(4, dtype=torch.int32)), DtypeMismatchError, NORM),
    "not finite": (_put(NORM, torch.tensor([0.0, 1.0, torch.nan, 2.0])), ContentError, "not finite"),
    "renamed": (_duplicate_key, UnknownTensorError, "weighT"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), ContentError, "its header describes"),
    "header cut": (lambda path: path.write_bytes(path.read_bytes()[:30]), ContentError, "cut short"),
    "header absurd": (_huge_header, ContentError, "cut short"),
    "empty": (lambda path: path.write_bytes(b""), ContentError, "not a safetensors file"),
    "gone": (lambda path: path.unlink(), WeightRequestError, "no .*safetensors"),
    "a pipe": (_fifo, WeightRequestError, "is not a file"),
}


@pytest.mark.parametrize("fault", DISK_FAULTS)
def test_a_wrong_checkpoint_changes_nothing(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater, fault: str
) -> None:
    damage, kind, reason = DISK_FAULTS[fault]
    folder = in_one_file(tmp_path / "new", version(2))
    damage(folder / "model.safetensors")
    before = weights.snapshot()
    with pytest.raises(kind, match=reason):
        refresh(updater, disk(folder, weights))
    assert weights.snapshot() == before
    assert not updater.is_open
    refresh(updater, disk(in_one_file(tmp_path / "good", version(3)), weights))
    assert same_bits(held(weights), version(3))


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_not_a_signal(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater
) -> None:
    folder = in_one_file(tmp_path / "new", version(2))
    source = disk(folder, weights)
    before = weights.snapshot()
    real = source.receive

    def shrinks() -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        buckets = real()
        yield next(buckets)
        os.truncate(folder / "model.safetensors", 800)
        yield from buckets

    source.receive = shrinks  # type: ignore[method-assign]
    with pytest.raises(ContentError, match="ends at byte"):
        refresh(updater, source)
    assert weights.snapshot() == before


def test_a_bucket_of_an_open_update_need_not_be_complete(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater
) -> None:
    new = version(2)
    rest = {name: tensor for name, tensor in new.items() if name != NORM}
    updater.begin("2")
    updater.receive(disk(in_one_file(tmp_path / "rest", rest), weights, complete=False))
    updater.receive(disk(in_one_file(tmp_path / "norm", {NORM: new[NORM]}), weights, complete=False))
    updater.verify()
    updater.commit()
    assert same_bits(held(weights), new)


def test_a_folder_between_two_versions_is_not_read(
    tmp_path: Path, weights: FakeWeights, updater: WeightUpdater
) -> None:
    folder = in_one_file(tmp_path / "local", version(2))
    (folder / SYNC_FOLDER).mkdir()
    (folder / SYNC_FOLDER / LOCK_FILE).touch()
    local = LocalVersion(1, ("model.safetensors",))
    write_state(folder, LocalState(local, LocalVersion(2, local.files), local.files))
    with pytest.raises(TransactionStateError, match="between two versions"):
        refresh(updater, disk(folder, weights))
    write_state(folder, LocalState(local))
    with (
        locked(folder / SYNC_FOLDER / LOCK_FILE, shared=False, timeout_s=1.0),
        pytest.raises(TransactionStateError, match="locked by another process"),
    ):
        refresh(updater, disk(folder, weights))
    source = disk(folder, weights)
    refresh(updater, source)
    assert source.local_version == local
    with open(folder / SYNC_FOLDER / LOCK_FILE) as lock:  # nothing holds it any more
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- broadcast deltas ---------------------------------------------------------------------------------------------


class Delivered(BucketSource):
    """A transport that brings these tensors."""

    must_drain = True

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._named = [(f"part {number}", tensor) for number, tensor in enumerate(tensors)]

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._named]

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        yield self._named


def delta_source(payload: bytes, weights: FakeWeights) -> DeltaSource:
    return DeltaSource(Delivered(torch.frombuffer(bytearray(payload), dtype=torch.uint8)), weights)


def nudged(tensors: Tensors, steps: int = 1) -> Tensors:
    """Every third element a few units in the last place further."""
    result = {}
    for name, tensor in tensors.items():
        words = tensor.clone().view(-1).view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
        words[::3] += steps
        result[name] = words.view(tensor.dtype).view(tensor.shape)
    return result


def test_a_delta_in_several_frames_becomes_the_weights(weights: FakeWeights, updater: WeightUpdater) -> None:
    new = nudged(version(1))
    delta = DeltaEncoder(version(1).items(), frame_bytes=60).encode(new.items())
    assert len(delta.frames) > 2
    updater.begin("2")
    for payload in delta.payloads():
        updater.receive(delta_source(payload, weights))
    updater.verify()
    updater.commit()
    assert same_bits(held(weights), new)
    assert digest((meta, fingerprint(weights.read(name))) for name, meta in weights.metas().items()) == delta.digest


def test_a_delta_is_its_own_undo(weights: FakeWeights, updater: WeightUpdater) -> None:
    before = weights.snapshot()
    encoder = DeltaEncoder(version(1).items())
    (frame,) = encoder.encode(nudged(version(1), 300).items()).frames
    (payload,) = encoder.encode(nudged(version(1), 300).items()).payloads()
    refresh(updater, delta_source(payload, weights))
    assert weights.snapshot() != before
    refresh(updater, delta_source(write_frame(frame.invert()), weights))
    assert weights.snapshot() == before


def test_a_delta_on_another_base_is_refused(weights: FakeWeights, updater: WeightUpdater) -> None:
    encoder = DeltaEncoder(version(1).items())
    (payload,) = encoder.encode(nudged(version(1)).items()).payloads()
    refresh(updater, delta_source(payload, weights))
    before = weights.snapshot()
    with pytest.raises(BaseMismatchError, match="starts from fingerprint"):
        refresh(updater, delta_source(payload, weights))  # repeated
    assert weights.snapshot() == before
    assert not updater.is_open


def test_where_tensors_are_written_as_they_come_every_base_is_checked_first(weights: FakeWeights) -> None:
    """Otherwise a delta whose last tensor has another base would leave the first ones written."""
    in_place = WeightUpdater(weights, device="cpu", timeout_s=5.0, vote=lambda mine: mine, staging="in_place")
    other = version(1)
    last = list(other)[-1]
    other[last] = other[last] + 1
    (payload,) = DeltaEncoder(other.items()).encode(nudged(other).items()).payloads()
    before = weights.snapshot()
    with pytest.raises(BaseMismatchError, match=last):
        refresh(in_place, delta_source(payload, weights))
    assert weights.snapshot() == before
    (payload,) = DeltaEncoder(version(1).items()).encode(nudged(version(1)).items()).payloads()
    refresh(in_place, delta_source(payload, weights))
    assert same_bits(held(weights), nudged(version(1)))


def test_a_delta_that_makes_a_value_that_is_not_finite_is_refused(weights: FakeWeights, updater: WeightUpdater) -> None:
    planted = {name: tensor.clone() for name, tensor in version(1).items()}
    planted[NORM][0] = torch.inf
    (payload,) = DeltaEncoder(version(1).items()).encode(planted.items()).payloads()
    before = weights.snapshot()
    with pytest.raises(ContentError, match="not finite"):
        refresh(updater, delta_source(payload, weights))
    assert weights.snapshot() == before


def _payload_of(tensors: Tensors) -> bytes:
    (payload,) = DeltaEncoder(tensors.items()).encode(nudged(tensors).items()).payloads()
    return payload


def test_a_delta_of_what_the_model_does_not_hold_is_refused(weights: FakeWeights, updater: WeightUpdater) -> None:
    old = version(1)
    before = weights.snapshot()
    cases: list[tuple[Tensors, type[WeightSyncError], str]] = [
        (old | {"stranger": torch.zeros(3)}, UnknownTensorError, "stranger"),
        (old | {NORM: torch.zeros(9)}, ShapeMismatchError, NORM),
        (old | {NORM: old[NORM].to(torch.bfloat16)}, DtypeMismatchError, NORM),
        (fused(old), WeightRequestError, "the model's own tensors and names"),
        ({name: tensor for name, tensor in old.items() if name != NORM}, CoverageError, "missing"),
    ]
    for tensors, kind, reason in cases:
        with pytest.raises(kind, match=reason):
            refresh(updater, delta_source(_payload_of(tensors), weights))
        assert weights.snapshot() == before
        assert not updater.is_open


def test_a_delta_call_announces_one_run_of_bytes(weights: FakeWeights) -> None:
    for wrong in (
        [],
        [torch.zeros(4)],
        [torch.zeros(2, 2, dtype=torch.uint8)],
        [torch.zeros(4, dtype=torch.uint8)] * 2,
    ):
        with pytest.raises(WeightRequestError, match="one uint8 tensor"):
            DeltaSource(Delivered(*wrong), weights).announce(1 << 20)


def test_the_sender_of_a_refused_delta_is_told(updater: WeightUpdater, weights: FakeWeights) -> None:
    told: list[str] = []

    class Refusable(Delivered):
        def refuse(self, reason: str) -> None:
            told.append(reason)

    updater.begin()
    with pytest.raises(WeightRequestError):
        updater.receive(DeltaSource(Refusable(torch.zeros(4)), weights))
    (reason,) = told
    assert "one uint8 tensor" in reason


# --- published deltas -----------------------------------------------------------------------------------------------


def test_pull_and_read_back(tmp_path: Path, weights: FakeWeights, updater: WeightUpdater) -> None:
    """The local checkpoint that a pull makes is one that the engine loads."""
    old = version(1)
    base = in_one_file(tmp_path / "base", old)
    publish_bytes(tmp_path / "source", 1, old, nudged(old))
    pull(tmp_path / "local", base, tmp_path / "source", 1, timeout_s=1.0)
    source = disk(tmp_path / "local", weights)
    refresh(updater, source)
    assert same_bits(held(weights), nudged(old))
    assert source.local_version is not None
    assert source.local_version.version == 1
    assert json.loads((tmp_path / "local" / SYNC_FOLDER / "state.json").read_text())["version"] == "000001"

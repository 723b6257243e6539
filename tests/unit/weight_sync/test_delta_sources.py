"""Disk and delta sources through a real updater: bit-exact, all or nothing, and every fence refuses."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
import torch

from tests.delta_models import Delivered, Tensors, delta_source, nudged, same_bits
from tests.logical_weights_fake import EMBED, LM_HEAD, NORM, FakeWeights, fused, version
from tests.published_versions import write_checkpoint
from weight_sync.delta.durable import locked
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.frame import write_frame
from weight_sync.delta.local_checkpoint import pull
from weight_sync.delta.local_state import LOCK_FILE, SYNC_FOLDER, LocalState, LocalVersion, write_state
from weight_sync.delta.publisher import publish_bytes
from weight_sync.errors import (
    TransactionStateError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.known_calls import KnownCalls
from weight_sync.receivers.base import BucketSource
from weight_sync.receivers.delta import DELTA, DeltaSource
from weight_sync.receivers.disk import DiskSource
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
    return DiskSource(path, weights, complete=complete, timeout_s=0.2, known_calls=KnownCalls(1 << 10))


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
    """A folder may hold fused experts, another floating-point dtype, and a tied head next to the embedding."""
    new = version(2)
    forms = {name: tensor.to(torch.float32) for name, tensor in fused(new).items()}
    forms[LM_HEAD] = forms[EMBED].clone()
    refresh(updater, disk(in_one_file(tmp_path / "new", forms), weights))
    assert same_bits(held(weights), new)


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


def test_plans_of_earlier_places_do_not_pile_up(
    weights: FakeWeights, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rebalance gives the places another key, and so the plan of the same list of tensors."""
    known = updater.model.known_calls
    payloads = [DeltaEncoder(version(1).items()).encode(nudged(version(1)).items()).payloads()[0]]
    payloads.append(DeltaEncoder(nudged(version(1)).items()).encode(version(1).items()).payloads()[0])
    for moved in range(20):
        monkeypatch.setattr(FakeWeights, "places_key", lambda _, key=moved: key)
        inner = Delivered(torch.frombuffer(bytearray(payloads[moved % 2]), dtype=torch.uint8))
        refresh(updater, DeltaSource(inner, weights, known_calls=known))
    kept = sum(key[0] == DELTA and len(key) == 3 for key in known._calls)
    assert kept <= 3, "plans take memory for each tensor, and are counted so"


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
    """The engine loads the local checkpoint that a pull makes."""
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

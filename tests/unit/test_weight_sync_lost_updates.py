"""What is left of an update that was begun and dropped is not taken for updates of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollout.core.weight_io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from rollout.scheduler.weight_sources import SOURCES
from tests.local_refresh import updater_of
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.checker import live_fingerprints
from weight_sync.lease import DEFAULT_LEASE_S
from weight_sync.lost_updates import LostUpdates


def test_a_label_is_lost_until_it_is_begun_again_or_committed() -> None:
    lost = LostUpdates()
    lost.note("v2", told=True)
    assert lost.reason_against("v2") is not None
    assert lost.reason_against("v3") is None and lost.reason_against(None) is None
    lost.tell("abort")  # that an update is over does not make its buckets updates of their own
    assert lost.reason_against("v2") is not None
    lost.forget("v2")
    assert lost.reason_against("v2") is None


def test_without_a_label_calls_are_refused_until_somebody_is_told() -> None:
    lost = LostUpdates()
    lost.note(None, told=True)
    assert lost.reason_against(None) is None
    lost.note(None, told=False)
    lost.tell("receive")
    assert lost.reason_against(None) is not None
    lost.tell("abort")
    assert lost.reason_against(None) is None


def test_labels_are_remembered_up_to_a_number() -> None:
    lost = LostUpdates()
    for number in range(1000):
        lost.note(f"v{number}", told=True)
    assert lost.reason_against("v999") is not None and lost.reason_against("v0") is None


@pytest.fixture
def trainer(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackTrainer]:
    torch.set_num_threads(1)
    trainer = LoopbackTrainer(logical_tensors(tiny_checkpoint(tmp_path_factory.mktemp("new") / "model", seed=2)))
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    yield trainer


@pytest.mark.parametrize("how", ["lease", "abort"])
@pytest.mark.parametrize("label", ["v2", None])
def test_a_sender_that_was_dropped_in_the_middle_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, trainer: LoopbackTrainer, how: str, label: str | None
) -> None:
    harness = Harness(tiny_checkpoint(tmp_path_factory.mktemp("old") / "model", seed=1), weight_version="v1")
    now = 0.0
    updater_of(harness)._clock = lambda: now
    before = live_fingerprints(updater_of(harness).weights)
    names = sorted(trainer.tensors)
    assert harness.control(BeginWeightUpdateReqInput, weight_version=label).success
    assert trainer.send(harness, names[:10], label).success
    if how == "abort":
        assert harness.control(AbortWeightUpdateReqInput).success  # somebody else's
    else:
        now += 2 * DEFAULT_LEASE_S
    late = trainer.send(harness, names[10:20], label)
    if how == "abort" and label is None:
        # Nothing tells it from a call outside of begin and end, which comes into force by itself.
        assert late.success and live_fingerprints(updater_of(harness).weights) != before
        return
    assert not late.success and late.status_code == 409 and "dropped" in late.message
    assert live_fingerprints(updater_of(harness).weights) == before
    assert harness.scheduler.runner.state.epoch.weight_version == "v1"
    if label is None:
        assert harness.control(AbortWeightUpdateReqInput).status_code == 409  # the sender is told
        assert trainer.send(harness, names[10:20]).success  # so this is a call of its own
    else:
        assert trainer.refresh(harness, label).success
        assert trainer.send(harness, names[10:20], label).success

"""The state of the open update: what is shown while a verb is under way, and what asking for it costs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from tests.loopback_refresh import LoopbackTrainer
from tests.loopback_updater import LoopbackSource
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.transaction import NAME_FIELDS, STATUS_FIELDS, WeightTransaction


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackTrainer:
    trainer = LoopbackTrainer(logical_tensors(folder))
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    return trainer


def test_while_a_bucket_comes_the_state_is_that_of_its_beginning(
    folder: Path, trainer: LoopbackTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state was not asked for between the last verb and this one."""
    harness, go = Harness(folder), threading.Event()
    first, second = (sorted(trainer.tensors)[part::2] for part in range(2))
    before = harness.control(GetWeightUpdateReqInput).data
    assert not before["open"] and not before["busy"]
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2", update_id="a").success
    assert trainer.send(harness, first, update_id="a").success

    class Slow(LoopbackSource):
        def receive(self) -> Any:
            assert go.wait(30)
            yield from super().receive()

    named = [(name, trainer.tensors[name]) for name in second]
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, lambda verb, _: Slow(named))
    fields: dict[str, Any] = {"names": second, "dtypes": [], "shapes": [], "update_id": "a"}
    bucket = harness.post(UpdateWeightsFromDistributedReqInput, **fields)
    harness.tick()
    shown = harness.control(GetWeightUpdateReqInput).data
    assert shown["busy"] and shown["open"] and shown["update_id"] == "a" and shown["weight_version"] == "v2"
    assert (shown["received"], shown["missing"]) == (len(first), len(second))
    go.set()
    assert harness.wait(bucket).success
    after = harness.control(GetWeightUpdateReqInput).data
    assert not after["busy"] and (after["received"], after["missing"]) == (len(first) + len(second), 0)


@pytest.mark.parametrize("staging", ["host", "in_place"])
def test_a_bucket_asks_its_transaction_for_no_list_of_names(
    folder: Path, trainer: LoopbackTrainer, monkeypatch: pytest.MonkeyPatch, staging: str
) -> None:
    """Counts come from `status`: a list of all names, for each bucket and between two steps, would stop generation."""
    harness = Harness(folder, weight_staging=staging)
    assert harness.control(BeginWeightUpdateReqInput, update_id="a").success
    asked: list[str] = []

    def lists(name: str) -> property:
        return property(lambda self: asked.append(name) or [])  # type: ignore[func-returns-value]

    counts = dict.fromkeys(STATUS_FIELDS) | dict.fromkeys(NAME_FIELDS, ()) | {"received": 3, "missing": 1}
    monkeypatch.setattr(WeightTransaction, "status", lambda self: counts)
    monkeypatch.setattr(WeightTransaction, "received", lists("received"))
    monkeypatch.setattr(WeightTransaction, "missing", lists("missing"))
    monkeypatch.setattr(WeightTransaction, "num_bytes", lists("num_bytes"))
    assert trainer.send(harness, sorted(trainer.tensors)[:4], update_id="a").success
    assert harness.control(GetWeightUpdateReqInput).data["received"] == 3
    assert harness.scheduler.serving.is_writing == (staging == "in_place")
    assert asked == []

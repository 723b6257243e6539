"""Boxes of tensors that come in place, on one rank and on two: no step reads them, and what they tear is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from tests.loopback_updater import LoopbackSource
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness, control_of
from tests.scheduler_harness import Harness
from weight_sync.boxes import index_of
from weight_sync.in_model import InPlaceStaging
from weight_sync.plan import BucketPlan
from weight_sync.tensor_meta import TensorMeta
from weight_sync.updater import WeightUpdater

PROMPT = [7, 3, 9]
Start = Callable[[str], Harness]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("old") / "m", "moe_dense_first", seed=5)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    made = tiny_checkpoint(tmp_path_factory.mktemp("new") / "m", "moe_dense_first", seed=6)
    return {name: tensor.double() for name, tensor in logical_tensors(made).items()}


@pytest.fixture
def start(folder: Path, new: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts an engine of one rank or of two, whose buckets come as `halves` of `new`."""
    started: list[ParallelHarness] = []

    def source(verb: UpdateWeightsFromDistributedReqInput, _: Any) -> LoopbackSource:
        names, _, _, boxes = verb.lists()
        metas, parts = [], []
        for name, box in zip(names, boxes or [], strict=True):
            edges = tuple((first, last) for first, last in box)
            tensor = new.get(name, torch.zeros(2, 2, dtype=torch.float64))
            metas.append(TensorMeta(name, tensor.dtype, tuple(tensor.shape), edges))
            parts.append((name, tensor[index_of(edges)].contiguous()))
        return LoopbackSource(parts, metas=metas)

    def start(ranks: str) -> Harness:
        if ranks == "one rank":
            return Harness(folder, dtype="float64", num_threads=1, weight_staging="in_place")
        started.append(ParallelHarness(folder, tp_size=2, weight_staging="in_place"))
        return started[-1]

    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, source)
    yield start
    for harness in started:
        harness.close()


def schedulers(harness: Harness) -> list[Any]:
    return harness.schedulers if isinstance(harness, ParallelHarness) else [harness.scheduler]


def half(tensor: torch.Tensor, which: int) -> list[tuple[int, int]]:
    """Return the box of one half of a tensor's first dimension."""
    middle = tensor.shape[0] // 2
    rows = (0, middle) if which == 0 else (middle, tensor.shape[0])
    return [rows, *((0, size) for size in tensor.shape[1:])]


def send(harness: Harness, tensors: dict[str, torch.Tensor], which: int) -> Any:
    lists = {"names": list(tensors), "dtypes": ["float64"] * len(tensors)}
    shapes, boxes = [list(each.shape) for each in tensors.values()], [half(each, which) for each in tensors.values()]
    return harness.control(UpdateWeightsFromDistributedReqInput, **lists, shapes=shapes, boxes=boxes, update_id="u")


def begin(harness: Harness, **fields: Any) -> None:
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2", update_id="u", **fields).success


def received(harness: Harness) -> set[int]:
    updates = [control_of(scheduler)._updater.update for scheduler in schedulers(harness)]
    return {update.num_received for update in updates if update is not None}


def refresh_with_a_step_between(harness: Harness, new: dict[str, torch.Tensor]) -> None:
    """Refresh by boxes while a request runs, and check that it stands still from the first box to the commit."""
    rid = harness.submit(PROMPT, params={"max_new_tokens": 40, "ignore_eos": True})
    harness.tick()
    begin(harness)
    assert harness.tick(), "steps run until the first box comes"
    assert send(harness, new, 0).success
    assert received(harness) == {0}, "boxes alone have come"
    assert all(scheduler.serving.is_writing for scheduler in schedulers(harness))
    assert not any(harness.tick() for _ in range(3)), "a step ran on weights of two versions"
    assert send(harness, new, 1).success
    assert not harness.tick()
    ended = harness.control(EndWeightUpdateReqInput, update_id="u")
    assert ended.success, ended.message
    harness.run()
    assert [version for version, _, _ in harness.results[rid].versions][-1] == "v2"
    assert all(scheduler.serving.poisoned is None for scheduler in schedulers(harness))


def tear(harness: Harness, new: dict[str, torch.Tensor], end: str) -> None:
    """Send boxes alone, end the update without a commit, and check that nothing is served."""
    begin(harness, **({"lease_s": 0.5} if end == "lost" else {}))
    assert send(harness, new, 0).success
    if end == "abort":
        assert harness.control(AbortWeightUpdateReqInput, update_id="u").success
    elif end == "lost":
        time.sleep(0.6)
        harness.tick()
    else:
        assert not send(harness, {"ghost": torch.zeros(2, 2)}, 0).success
    for scheduler in schedulers(harness):
        assert scheduler.serving.poisoned is not None and "overwritten in place" in scheduler.serving.poisoned
    rid = harness.submit(PROMPT, params={"max_new_tokens": 2})
    harness.run()
    assert harness.results[rid].finished.reason.status_code == 503  # type: ignore[union-attr]


RANKS = pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
ENDS = pytest.mark.parametrize("end", ["abort", "lost", "refused"])


@RANKS
def test_no_step_runs_between_two_buckets_of_boxes(start: Start, new: dict[str, torch.Tensor], ranks: str) -> None:
    refresh_with_a_step_between(start(ranks), new)


@RANKS
@ENDS
def test_boxes_that_are_not_committed_poison(start: Start, new: dict[str, torch.Tensor], ranks: str, end: str) -> None:
    tear(start(ranks), new, end)


def goes_by_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine hold steps, and know what it overwrote, by the number of whole tensors: wrong."""

    def before(self: InPlaceStaging, storages: Any, names: Any) -> None:
        self._has_written |= bool(names)

    def is_dirty(self: WeightUpdater) -> bool:
        update = self.update
        return update is not None and (update.transaction.dirty or (self.holds_steps and update.num_received > 0))

    monkeypatch.setattr(InPlaceStaging, "_before", before)
    monkeypatch.setattr(BucketPlan, "all_names", property(lambda self: self.names))
    monkeypatch.setattr(WeightUpdater, "is_dirty", property(is_dirty))


@pytest.mark.mutant
@RANKS
def test_a_step_between_boxes_is_noticed(
    start: Start, new: dict[str, torch.Tensor], ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_by_whole_tensors(monkeypatch)
    with pytest.raises(AssertionError):
        refresh_with_a_step_between(start(ranks), new)


@pytest.mark.mutant
@RANKS
@ENDS
def test_torn_weights_that_are_served_are_noticed(
    start: Start, new: dict[str, torch.Tensor], ranks: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_by_whole_tensors(monkeypatch)
    with pytest.raises(AssertionError):
        tear(start(ranks), new, end)

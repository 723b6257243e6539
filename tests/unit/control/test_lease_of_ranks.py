"""The end of a lease on several ranks, which open an update at different times: all ranks find it in the same turn.

The I/O threads of rank 1 read an earlier time, as they do where a turn passes between the readings of two ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from rollout.control.weight_disk import DiskRefresh
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.adapter_updates import FAMILY, SEED, Content, begin, make_content, update_id
from tests.family_zoo import family_checkpoint
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness, control_of
from tests.unit.control.test_parallel_refresh import send
from weight_sync import updater as updater_module
from weight_sync.errors import StagingError, WeightRequestError
from weight_sync.updater import WeightUpdater

SKEW_S = 0.3
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


@pytest.fixture(scope="module")
def tensors(folder: Path) -> Tensors:
    return {name: tensor.double() * 2 for name, tensor in logical_tensors(folder).items()}


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[ParallelHarness]:
    with ParallelHarness(folder, tp_size=2, enable_memory_saver=True) as harness:
        skew(harness)
        yield harness


@pytest.fixture
def engine(started: ParallelHarness, tensors: Tensors) -> Iterator[ParallelHarness]:
    yield started
    started.control(AbortWeightUpdateReqInput)
    started.control(ContinueGenerationReqInput)
    assert not any(each.is_open for each in updaters(started))


def updaters(harness: ParallelHarness) -> list[WeightUpdater]:
    return [control_of(scheduler)._updater for scheduler in harness.schedulers]


def skew(harness: ParallelHarness) -> None:
    """Have the I/O threads of rank 1 read the time of an earlier turn."""
    updater = updaters(harness)[1]
    usual = updater._clock

    def clock() -> float:
        is_step_side = threading.current_thread().name.startswith("rank")
        return usual() - (0.0 if is_step_side else SKEW_S)

    updater._clock = clock


def check_agree(harness: ParallelHarness) -> None:
    """Check that an update is open on all ranks, and ends on all of them at once."""
    assert all(updater.is_open for updater in updaters(harness))
    deadlines = {updater.lease_deadline for updater in updaters(harness)}
    assert len(deadlines) == 1, deadlines


def bucket(harness: ParallelHarness, named: Tensors, **fields: Any) -> Any:
    (answer,) = send(harness, named, parts=1, **fields)
    return answer


# --- an update that was only opened ----------------------------------------------------------------------------------


def test_a_trainer_that_dies_right_after_begin_ends_no_engine(engine: ParallelHarness) -> None:
    begun = engine.control(BeginWeightUpdateReqInput, weight_version="v1", update_id="dead", lease_s=0.6)
    assert begun.success, begun.message
    check_agree(engine)
    until = time.monotonic() + 10.0
    while updaters(engine)[0].is_open and time.monotonic() < until:
        engine.tick()
        assert len({updater.is_open for updater in updaters(engine)}) == 1
    assert engine.control(GetWeightUpdateReqInput, update_id="dead").data["outcome"] == "lost"


def test_a_first_bucket_without_begin_starts_one_lease(engine: ParallelHarness, tensors: Tensors) -> None:
    assert engine.control(PauseGenerationReqInput).success
    assert bucket(engine, {NORM: tensors[NORM]}).success
    check_agree(engine)


def test_so_does_a_first_bucket_that_fails(engine: ParallelHarness, tensors: Tensors) -> None:
    assert engine.control(PauseGenerationReqInput).success
    assert bucket(engine, {NORM: torch.full_like(tensors[NORM], torch.nan)}).status_code == 400
    check_agree(engine)
    assert {updater.status()["state"] for updater in updaters(engine)} == {"failed"}


def test_so_does_the_first_bucket_of_another_pause(engine: ParallelHarness, tensors: Tensors) -> None:
    """It drops the update of the pause before."""
    for _ in range(2):
        assert engine.control(PauseGenerationReqInput).success
        assert bucket(engine, {NORM: tensors[NORM]}).success
        check_agree(engine)


def test_so_does_the_first_call_into_lost_weights(engine: ParallelHarness, tensors: Tensors) -> None:
    assert engine.control(ReleaseMemoryOccupationReqInput).success
    assert engine.control(ResumeMemoryOccupationReqInput).success
    assert bucket(engine, {NORM: tensors[NORM]}).success
    check_agree(engine)
    rest = {name: tensor for name, tensor in tensors.items() if name != NORM}
    assert bucket(engine, rest).data["num_tensors"] == len(tensors)
    assert not any(updater.is_open for updater in updaters(engine))


def test_an_update_whose_verbs_come_at_once_is_committed(engine: ParallelHarness, tensors: Tensors) -> None:
    """The begin, bucket and end of `whole_update` wait in the queue together."""
    payload = bytearray(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    verbs: list[tuple[type, dict[str, Any]]] = [
        (BeginWeightUpdateReqInput, {"weight_version": "v1"}),
        (UpdateWeightsFromTensorReqInput, {"payload": payload, "format": "safetensors"}),
        (EndWeightUpdateReqInput, {}),
    ]
    waiting = [engine.post(verb, update_id="whole", **fields) for verb, fields in verbs]
    assert all(engine.wait(verb).success for verb in waiting)
    assert not any(updater.is_open for updater in updaters(engine))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Content:
    return make_content(tmp_path_factory.mktemp("content") / "a", 0)


def test_so_does_the_update_of_an_adapter(content: Content, tmp_path: Path) -> None:
    settings = {"enable_lora": True, "lora_paths": f"poet={content.folder}", "skip_tokenizer_init": True}
    settings |= {"enable_return_routed_experts": False, "max_loras_per_batch": 2, "dtype": "float32"}
    with ParallelHarness(family_checkpoint(tmp_path / "m", FAMILY, SEED), tp_size=2, **settings) as engine:
        skew(engine)
        begun = begin(engine, content.target(), content.named)
        assert begun.success, begun.message
        check_agree(engine)
        assert engine.control(AbortWeightUpdateReqInput, update_id=update_id(engine)).success


# --- one rank alone cannot open it -----------------------------------------------------------------------------------


@pytest.fixture
def one_cannot(engine: ParallelHarness, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which rank 1 can open updates again."""
    own, usual = updaters(engine)[1].model, updater_module.UpdateTarget.open

    def opening(self: Any, *arguments: Any, **fields: Any) -> Any:
        if self is own:
            raise StagingError("no memory is left")
        return usual(self, *arguments, **fields)

    monkeypatch.setattr(updater_module.UpdateTarget, "open", opening)
    return monkeypatch.undo


@pytest.mark.parametrize("state", ["paused", "running", "empty"])
def test_an_update_that_one_rank_cannot_open_is_opened_by_none(
    engine: ParallelHarness, tensors: Tensors, one_cannot: Callable[[], None], state: str
) -> None:
    """Nor is it lost on some of them: the next call has the same effect on all ranks."""
    if state == "paused":
        assert engine.control(PauseGenerationReqInput).success
    if state == "empty":
        assert engine.control(ReleaseMemoryOccupationReqInput).success
        assert engine.control(ResumeMemoryOccupationReqInput).success
    refused = bucket(engine, {NORM: tensors[NORM]})
    assert not refused.success and refused.message == "rank 1: no memory is left"
    assert [updater.is_open for updater in updaters(engine)] == [False, False]
    assert [updater.book.loss for updater in updaters(engine)] == [None, None]
    one_cannot()
    assert bucket(engine, tensors).success
    if state == "paused":
        check_agree(engine)
        assert engine.control(ContinueGenerationReqInput).success


def test_a_begin_that_one_rank_cannot_carry_out_opens_nothing(
    engine: ParallelHarness, one_cannot: Callable[[], None]
) -> None:
    refused = engine.control(BeginWeightUpdateReqInput, weight_version="v1")
    assert not refused.success and "no memory is left" in refused.message
    assert [updater.is_open for updater in updaters(engine)] == [False, False]


# --- one rank alone cannot take a call of it -------------------------------------------------------------------------


def check_failed_on_all(harness: ParallelHarness) -> None:
    check_agree(harness)
    assert {updater.status()["state"] for updater in updaters(harness)} == {"failed"}
    assert len({updater.status()["weight_version"] for updater in updaters(harness)}) == 1


def test_a_bucket_that_one_rank_cannot_take_labels_the_update_on_all(
    engine: ParallelHarness, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label decides whose the next call is, and only the calls of an update renew its lease."""
    assert engine.control(BeginWeightUpdateReqInput).success

    def receive(*_: Any) -> None:
        raise StagingError("no memory is left")

    opened = updaters(engine)[1].update
    assert opened is not None
    monkeypatch.setattr(opened.transaction, "receive", receive)
    fields = {"payload": bytearray(save({NORM: tensors[NORM].contiguous()})), "format": "safetensors"}
    refused = engine.control(UpdateWeightsFromTensorReqInput, weight_version="v1", **fields)
    assert not refused.success and "rank 1: no memory is left" in refused.message
    check_failed_on_all(engine)
    assert not engine.control(UpdateWeightsFromTensorReqInput, weight_version="v2", **fields).success
    check_failed_on_all(engine)


def test_a_folder_that_one_rank_cannot_read_fails_the_update_on_all(
    engine: ParallelHarness, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.control(BeginWeightUpdateReqInput, update_id="u").success
    own, usual = updaters(engine)[1], DiskRefresh._source_of

    def source_of(self: DiskRefresh, *arguments: Any) -> Any:
        if self._updater is own:
            raise WeightRequestError("cannot read config.json")
        return usual(self, *arguments)

    monkeypatch.setattr(DiskRefresh, "_source_of", source_of)
    fields = {"model_path": str(folder), "weight_version": "v1", "update_id": "u"}
    refused = engine.control(UpdateWeightsFromDiskReqInput, **fields)
    assert not refused.success and "cannot read config.json" in refused.message
    check_failed_on_all(engine)
    assert {updater.is_dirty for updater in updaters(engine)} == {False}
    assert engine.control(AbortWeightUpdateReqInput, update_id="u").success

"""The lease of an update: the sender of the open update keeps it alive, and no stranger does.

A real scheduler on a clock of the test's; tensors are handed in where a process group would deliver them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    GetStateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
)
from rollout.core.messages.weight_check import WeightCheckReqInput
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    DropWeightSnapshotReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    GetWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    PullWeightsReqInput,
    RefusedBucketReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
    WeightsCheckerReqInput,
)
from rollout.scheduler.channel import LocalChannel
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness

LEASE_S = 10.0
NORM = "model.norm.weight"
LISTS = {"names": [NORM], "dtypes": ["float32"], "shapes": [[16]]}
ONE_TENSOR = [{"name": NORM, "dtype": "float32", "shape": [16]}]

STRANGERS: dict[str, tuple[type, dict[str, Any]]] = {
    "begin": (BeginWeightUpdateReqInput, {}),
    "begin with an id": (BeginWeightUpdateReqInput, {"update_id": "b", "weight_version": "B"}),
    "begin from another base": (BeginWeightUpdateReqInput, {"update_id": "b", "base_version": "none"}),
    "begin with a wrong manifest": (BeginWeightUpdateReqInput, {"update_id": "b", "manifest": ONE_TENSOR}),
    "end": (EndWeightUpdateReqInput, {"update_id": "b"}),
    "end without id": (EndWeightUpdateReqInput, {}),
    "verify": (EndWeightUpdateReqInput, {"update_id": "b", "phase": "verify"}),
    "commit": (EndWeightUpdateReqInput, {"update_id": "b", "phase": "commit"}),
    "abort": (AbortWeightUpdateReqInput, {"update_id": "b"}),
    "abort without id": (AbortWeightUpdateReqInput, {}),
    "status": (GetWeightUpdateReqInput, {}),
    "status of another": (GetWeightUpdateReqInput, {"update_id": "b"}),
    "status of this one": (GetWeightUpdateReqInput, {"update_id": "a"}),
    "state": (GetStateReqInput, {}),
    "broadcast": (UpdateWeightsFromDistributedReqInput, LISTS | {"update_id": "b"}),
    "broadcast without id": (UpdateWeightsFromDistributedReqInput, LISTS),
    "broadcast of another version": (UpdateWeightsFromDistributedReqInput, LISTS | {"weight_version": "B"}),
    "unreadable": (RefusedBucketReqInput, {"reason": "no JSON", "group_name": None, "update_id": "b"}),
    "tensors": (UpdateWeightsFromTensorReqInput, {"update_id": "b", "format": "safetensors"}),
    "ipc": (UpdateWeightsFromIPCReqInput, {"update_id": "b", "zmq_handles": {"cpu": "tcp://nowhere:1"}}),
    "disk": (UpdateWeightsFromDiskReqInput, {"update_id": "b", "model_path": "/nowhere"}),
    "disk without id": (UpdateWeightsFromDiskReqInput, {"model_path": "/nowhere"}),
    "pull": (PullWeightsReqInput, {"local_checkpoint_dir": "/tmp/x", "source_dir": "/tmp/y", "target_version": 1}),
    "pull with an id": (
        PullWeightsReqInput,
        {"local_checkpoint_dir": "/tmp/x", "source_dir": "/tmp/y", "target_version": 1, "update_id": "b"},
    ),
    "label": (UpdateWeightVersionReqInput, {"new_version": "B", "update_id": "b"}),
    "label without id": (UpdateWeightVersionReqInput, {"new_version": "B"}),
    "weights": (GetWeightsByNameReqInput, {"name": NORM}),
    "checksums": (WeightsCheckerReqInput, {}),
    "snapshot": (WeightsCheckerReqInput, {"action": "snapshot"}),
    "drop of a snapshot": (DropWeightSnapshotReqInput, {}),
    "checksums of vLLM": (WeightCheckReqInput, {"action": "checksum"}),
    "leave": (DestroyWeightsUpdateGroupReqInput, {}),
    "release": (ReleaseMemoryOccupationReqInput, {}),
}


class Engine:
    """A harness, its clock and who broadcasts."""

    def __init__(self, folder: Path, clock: list[float], trainer: LoopbackTrainer, **settings: Any) -> None:
        self.harness = Harness(folder, weight_version="v1", **settings)
        self.clock = clock
        self.trainer = trainer

    def ok(self, verb: type, **fields: Any) -> dict[str, Any]:
        answer = self.harness.control(verb, **fields)
        assert answer.success, answer.message
        return answer.data

    def pass_time(self, seconds: float) -> None:
        self.clock[0] += seconds
        self.harness.tick()

    def update(self) -> dict[str, Any]:
        return self.ok(GetStateReqInput)["weight_update"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "v1")


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    clock = [1000.0]
    trainer = LoopbackTrainer(logical_tensors(folder))
    monkeypatch.setattr(LocalChannel, "now", property(lambda _: clock[0]))
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    return lambda **settings: Engine(folder, clock, trainer, **settings)


@pytest.mark.parametrize("call", STRANGERS)
def test_no_call_of_a_stranger_keeps_a_dead_trainers_update_open(start: Callable[..., Engine], call: str) -> None:
    """E1: each call of the successor would renew the lease that keeps the successor out."""
    engine = start(enable_memory_saver=True)
    engine.ok(BeginWeightUpdateReqInput, update_id="a", weight_version="A", lease_s=LEASE_S)
    verb, fields = STRANGERS[call]
    for _ in range(4):
        engine.pass_time(LEASE_S * 0.3)
        engine.harness.control(verb, **fields)
    update = engine.update()
    assert not update["open"] or update["update_id"] != "a", update
    if not update["open"]:
        engine.ok(BeginWeightUpdateReqInput, update_id="successor")


@pytest.mark.parametrize("call", STRANGERS)
def test_no_call_of_a_stranger_keeps_a_dead_trainers_pause(start: Callable[..., Engine], call: str) -> None:
    """E1: nor does `--pause-timeout` start anew where the update began in the pause."""
    engine = start(pause_timeout=LEASE_S, enable_memory_saver=True)
    engine.ok(PauseGenerationReqInput, mode="in_place")
    engine.ok(BeginWeightUpdateReqInput, update_id="a", weight_version="A", lease_s=86400)
    verb, fields = STRANGERS[call]
    for _ in range(4):
        engine.pass_time(LEASE_S * 0.3)
        engine.harness.control(verb, **fields)
    assert not engine.harness.scheduler.serving.is_paused
    assert "--pause-timeout" in engine.update()["last_failure"]["reason"]


@pytest.mark.parametrize(
    "call", ["begin with a wrong manifest", "begin from another base", "status", "checksums", "leave"]
)
def test_a_pause_without_an_update_is_kept_by_nothing_that_is_refused_or_only_reads(
    start: Callable[..., Engine], call: str
) -> None:
    engine = start(pause_timeout=LEASE_S)
    engine.ok(PauseGenerationReqInput, mode="in_place")
    verb, fields = STRANGERS[call]
    for _ in range(4):
        engine.pass_time(LEASE_S * 0.3)
        engine.harness.control(verb, **fields)
    assert not engine.harness.scheduler.serving.is_paused


OWN: dict[str, tuple[type, dict[str, Any], bool]] = {
    "the same begin": (BeginWeightUpdateReqInput, {"weight_version": "A"}, True),
    "a bucket": (UpdateWeightsFromDistributedReqInput, LISTS, True),
    "an unknown name": (UpdateWeightsFromTensorReqInput, {"format": "safetensors"}, False),
    "an unreadable bucket": (RefusedBucketReqInput, {"reason": "no JSON", "group_name": None}, False),
    "a folder that is not there": (UpdateWeightsFromDiskReqInput, {"model_path": "/nowhere"}, False),
    "a label": (UpdateWeightVersionReqInput, {"new_version": "A2"}, True),
}


@pytest.mark.parametrize("call", OWN)
def test_every_call_of_the_update_renews_its_lease(start: Callable[..., Engine], call: str) -> None:
    """E1: a call renews it whether it is taken or refused for its content."""
    engine = start(pause_timeout=LEASE_S)
    engine.ok(PauseGenerationReqInput, mode="in_place")
    engine.ok(BeginWeightUpdateReqInput, update_id="a", weight_version="A", lease_s=LEASE_S)
    verb, fields, succeeds = OWN[call]
    engine.pass_time(LEASE_S * 0.9)
    assert engine.harness.control(verb, update_id="a", **fields).success == succeeds
    engine.pass_time(LEASE_S * 0.9)
    assert engine.update()["open"] and engine.harness.scheduler.serving.is_paused
    engine.pass_time(LEASE_S * 0.2)
    assert not engine.update()["open"] and not engine.harness.scheduler.serving.is_paused


def test_what_opens_an_update_in_a_pause_keeps_the_pause(start: Callable[..., Engine]) -> None:
    engine = start(pause_timeout=LEASE_S)
    engine.ok(PauseGenerationReqInput, mode="in_place")
    engine.pass_time(LEASE_S * 0.9)
    assert engine.trainer.send(engine.harness, [NORM], "B").success
    engine.pass_time(LEASE_S * 0.9)
    assert engine.update()["implicit"] and engine.harness.scheduler.serving.is_paused


@pytest.mark.parametrize("is_own", [True, False])
def test_a_call_that_came_in_time_is_waited_for(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """E1: a long call of a stranger neither costs the sender its lease nor renews the lease of a dead sender."""
    engine = start()
    engine.ok(BeginWeightUpdateReqInput, update_id="a", weight_version="A", lease_s=LEASE_S)
    over = threading.Event()
    usual = SOURCES[UpdateWeightsFromDistributedReqInput]

    def slow(verb: Any, updater: Any) -> Any:
        over.wait(10)
        return usual(verb, updater)

    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, slow)
    foreign = engine.harness.post(UpdateWeightsFromDistributedReqInput, update_id="b", **LISTS)
    engine.pass_time(LEASE_S * 0.5)
    waiting = engine.harness.post(UpdateWeightVersionReqInput, update_id="a" if is_own else "b", new_version="A2")
    engine.harness.tick()
    engine.pass_time(LEASE_S)
    over.set()
    assert engine.harness.wait(foreign).status_code == 409
    assert engine.harness.wait(waiting).success == is_own
    assert engine.update()["open"] == is_own


def test_a_continue_that_came_in_time_settles_its_update(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(pause_timeout=LEASE_S)
    engine.ok(PauseGenerationReqInput, mode="in_place")
    assert engine.trainer.send(engine.harness, None, "B").success
    over = threading.Event()
    usual = SOURCES[UpdateWeightsFromDistributedReqInput]

    def slow(verb: Any, updater: Any) -> Any:
        over.wait(10)
        return usual(verb, updater)

    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, slow)
    foreign = engine.harness.post(UpdateWeightsFromDistributedReqInput, update_id="b", **LISTS)
    engine.pass_time(LEASE_S * 0.5)
    going_on = engine.harness.post(ContinueGenerationReqInput)
    engine.harness.tick()
    engine.pass_time(LEASE_S)
    over.set()
    assert engine.harness.wait(foreign).status_code == 409
    assert engine.harness.wait(going_on).success
    assert engine.harness.scheduler.runner.state.epoch.weight_version == "B"


def test_a_group_that_is_joined_in_a_pause_keeps_it(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may wait long for the last member."""
    engine = start(pause_timeout=LEASE_S)
    engine.ok(PauseGenerationReqInput, mode="in_place")
    monkeypatch.setattr("weight_sync.update_groups.WeightUpdateGroups.init", lambda *_, **__: None)
    engine.pass_time(LEASE_S * 0.9)
    engine.ok(InitWeightsUpdateGroupReqInput, master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2)
    engine.pass_time(LEASE_S * 0.9)
    assert engine.harness.scheduler.serving.is_paused

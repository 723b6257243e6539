"""The owner of a call: late, foreign and lost updates change nothing, and each caller can ask for its own outcome.

A real scheduler; tensors are handed in where a process group would deliver them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.weight_queue import Job, nothing, replies
from rollout.core.messages import weights as weight_io_struct
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    GetStateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
)
from rollout.core.messages.message import NoReply
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    PullWeightsReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightVersionReqInput,
    WeightsCheckerReqInput,
)
from tests.local_refresh import control_of, updater_of
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness
from weight_sync.checker import live_fingerprints
from weight_sync.fingerprint import fingerprint
from weight_sync.process_group import free_port

PROMPT = [3, 1, 4, 1, 5]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def old(folders: list[Path]) -> Tensors:
    return logical_tensors(folders[0])


@pytest.fixture
def start(folders: list[Path]) -> Callable[..., Harness]:
    def harness(**settings: Any) -> Harness:
        started = Harness(folders[0], weight_version="v1", **settings)
        started.now = -1e9  # type: ignore[attr-defined]  # before the scheduler's clock: each turn checks leases
        updater_of(started)._clock = lambda: started.now  # type: ignore[attr-defined]
        return started

    return harness


def parts(trainer: LoopbackTrainer, count: int = 3) -> list[list[str]]:
    names = sorted(trainer.tensors)
    return [names[first::count] for first in range(count)]


def label(harness: Harness) -> str:
    return harness.scheduler.runner.state.epoch.weight_version


def serves(harness: Harness, tensors: Tensors) -> bool:
    live = live_fingerprints(updater_of(harness).weights)
    return live == {name: fingerprint(tensor) for name, tensor in tensors.items()}


def wait_until(harness: Harness, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        harness.tick()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def outcome(harness: Harness, update_id: str) -> dict[str, Any]:
    return harness.control(weight_io_struct.GetWeightUpdateReqInput, update_id=update_id).data


def update(harness: Harness) -> dict[str, Any]:
    return harness.control(GetStateReqInput).data["weight_update"]


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goes_on", ["bucket", "continue"])
def test_engine_02_a_pause_that_ended_between_two_buckets(
    start: Callable[..., Harness], trainer: LoopbackTrainer, old: Tensors, goes_on: str
) -> None:
    """The next bucket does not open an update of its own.  A continue without a bucket is refused once only."""
    harness = start(pause_timeout=0.2)
    first, second, _ = parts(trainer)
    assert harness.control(PauseGenerationReqInput).success
    assert trainer.send(harness, first, "v2").success
    wait_until(harness, lambda: not harness.scheduler.serving.is_paused)
    if goes_on == "bucket":
        late = trainer.send(harness, second, "v2")
        assert late.status_code == 409 and "--pause-timeout" in late.message
    else:
        told = harness.control(ContinueGenerationReqInput)
        assert told.status_code == 409 and "--pause-timeout" in told.message
    assert label(harness) == "v1" and serves(harness, old)
    assert harness.control(ContinueGenerationReqInput).success, "told once"
    assert trainer.send(harness, second, "v2").status_code == 409, "and refused until somebody starts anew"
    assert harness.control(PauseGenerationReqInput).success
    assert trainer.send(harness, None, "v2").success
    assert harness.control(ContinueGenerationReqInput).success
    assert label(harness) == "v2" and serves(harness, trainer.tensors)


def test_engine_02_a_pause_that_ended_before_the_first_bucket(
    start: Callable[..., Harness], trainer: LoopbackTrainer, old: Tensors
) -> None:
    harness = start(pause_timeout=0.1)
    assert harness.control(PauseGenerationReqInput).success
    wait_until(harness, lambda: not harness.scheduler.serving.is_paused)
    assert trainer.send(harness, parts(trainer)[0], "v2").status_code == 409
    assert label(harness) == "v1" and serves(harness, old)


def test_engine_02_a_stranger_continues_twice(
    start: Callable[..., Harness], trainer: LoopbackTrainer, old: Tensors
) -> None:
    harness = start()
    first, second, _ = parts(trainer)
    assert harness.control(PauseGenerationReqInput).success
    assert trainer.send(harness, first, "v2").success
    assert harness.control(ContinueGenerationReqInput).status_code == 400
    assert harness.control(ContinueGenerationReqInput).success and not harness.scheduler.serving.is_paused
    assert trainer.send(harness, second, "v2").status_code == 409
    assert label(harness) == "v1" and serves(harness, old)
    assert harness.control(AbortWeightUpdateReqInput).status_code == 409
    assert trainer.send(harness, second, "v2").success, "an abort says that what follows is meant"


@pytest.mark.parametrize("how", ["lease", "another's abort", "another's end"])
@pytest.mark.parametrize("named", ["v2", None])
def test_w20_late_buckets_of_a_lost_update(
    start: Callable[..., Harness], trainer: LoopbackTrainer, old: Tensors, how: str, named: str | None
) -> None:
    harness = start()
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2", lease_s=1).success
    first, *rest = parts(trainer)
    assert trainer.send(harness, first, named).success
    if how == "lease":
        harness.now = 1.5  # type: ignore[attr-defined]
    else:
        harness.control(AbortWeightUpdateReqInput if how == "another's abort" else EndWeightUpdateReqInput)
    for late in rest:
        assert trainer.send(harness, late, named).status_code == 409
    assert label(harness) == "v1" and serves(harness, old)
    assert trainer.refresh(harness, "v2").success
    assert label(harness) == "v2" and serves(harness, trainer.tensors)


# --- whose call ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["host", "in_place"])
def test_w07_two_trainers_do_not_mix(start: Callable[..., Harness], trainer: LoopbackTrainer, staging: str) -> None:
    """The first one's lease runs out, the second begins, and the first goes on: its calls are refused."""
    harness = start(weight_staging=staging)
    first, second, third = parts(trainer)
    assert harness.control(BeginWeightUpdateReqInput, lease_s=1, update_id="a").success
    harness.now = 2.0  # type: ignore[attr-defined]
    begun = harness.control(BeginWeightUpdateReqInput, weight_version="8", update_id="b")
    assert begun.success and begun.data["update_id"] == "b"
    assert trainer.send(harness, first, "8", "b").success
    for stray in (None, "a", "c"):
        for version in (None, "7", "8"):
            assert trainer.send(harness, second, version, stray).status_code == 409
        assert harness.control(EndWeightUpdateReqInput, update_id=stray).status_code == 409
        assert harness.control(AbortWeightUpdateReqInput, update_id=stray).status_code == 409
        assert harness.control(UpdateWeightVersionReqInput, new_version="x", update_id=stray).status_code == 409
    state = update(harness)
    assert state["bound"] and state["update_id"] == "b" and state["failed"] is None
    for part in (second, third):
        assert trainer.send(harness, part, None, "b").success
    assert harness.control(EndWeightUpdateReqInput, update_id="b").data["weight_version"] == "8"
    assert serves(harness, trainer.tensors) and harness.scheduler.serving.poisoned is None
    assert outcome(harness, "a")["outcome"] == "lost" and "lease" in outcome(harness, "a")["reason"]


def test_w07_a_part_without_manifest_needs_an_id(start: Callable[..., Harness], trainer: LoopbackTrainer) -> None:
    harness = start()
    refused = harness.control(BeginWeightUpdateReqInput, coverage="partial")
    assert refused.status_code == 400 and "update_id" in refused.message
    assert harness.control(BeginWeightUpdateReqInput, coverage="partial", update_id="a").success


def test_w07_a_call_with_the_id_binds_the_update(start: Callable[..., Harness], trainer: LoopbackTrainer) -> None:
    """An update that was begun without an id takes calls without, until one carries the id that begin answered."""
    harness = start()
    first, second, third = parts(trainer)
    update_id = harness.control(BeginWeightUpdateReqInput, weight_version="v2").data["update_id"]
    assert trainer.send(harness, first).success
    assert trainer.send(harness, second, None, update_id).success
    assert trainer.send(harness, third).status_code == 409
    assert trainer.send(harness, third, None, update_id).success
    assert harness.control(EndWeightUpdateReqInput).status_code == 409
    assert harness.control(EndWeightUpdateReqInput, update_id=update_id).success
    assert serves(harness, trainer.tensors)


def test_w07_a_stray_call_aborts_no_requests(start: Callable[..., Harness], trainer: LoopbackTrainer) -> None:
    harness = start()
    running = harness.submit(PROMPT, params={"max_new_tokens": 4})
    assert harness.control(BeginWeightUpdateReqInput, update_id="a").success
    fields = {"names": [], "dtypes": [], "shapes": [], "abort_all_requests": True}
    assert harness.control(UpdateWeightsFromDistributedReqInput, **fields).status_code == 409
    harness.run()
    assert harness.results[running].finished.reason.type == "length"  # type: ignore[union-attr]


def test_w07_a_stranger_s_abort_ends_no_receive(start: Callable[..., Harness], trainer: LoopbackTrainer) -> None:
    """An abort does not wait for a receive that no sender will finish, but for one of an update that is not its own."""
    harness = start()
    wait_limit = control_of(harness)._weights._wait_limit
    assert harness.control(BeginWeightUpdateReqInput, update_id="a").success
    receives = UpdateWeightsFromDistributedReqInput(request_id="q", names=[], dtypes=[], shapes=[])
    job = Job(receives, nothing, replies("", NoReply()))
    aborts = [AbortWeightUpdateReqInput(request_id="r", update_id=name) for name in ("a", "b", None)]
    assert [wait_limit(abort, job) for abort in aborts] == [0.0, None, None]


def test_who_leaves_a_group_ends_the_wait_in_it(start: Callable[..., Harness]) -> None:
    """The call ends a rendezvous in that group, and none in another one."""
    harness = start()

    def joining(name: str) -> Any:
        fields = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
        return harness.post(InitWeightsUpdateGroupReqInput, group_name=name, **fields)

    begun, joined = time.monotonic(), joining("mine")
    other = harness.post(DestroyWeightsUpdateGroupReqInput, group_name="another")
    mine = harness.post(DestroyWeightsUpdateGroupReqInput, group_name="mine")
    answers = [harness.wait(request) for request in (joined, other, mine)]
    assert time.monotonic() - begun < 10
    assert "DestroyWeightsUpdateGroup came" in answers[0].message
    assert [answer.status_code for answer in answers] == [502, 404, 404]


def test_w07_a_pull_that_names_another_update_is_refused(start: Callable[..., Harness], tmp_path: Path) -> None:
    harness = start()
    fields = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path), "target_version": 0}
    assert harness.control(PullWeightsReqInput, update_id="a", **fields).status_code == 409
    assert not (tmp_path / "local").exists()
    assert harness.control(PullWeightsReqInput, **fields).success


def test_w11_begin_and_end_may_be_repeated(start: Callable[..., Harness], trainer: LoopbackTrainer) -> None:
    """A sender whose answers were lost repeats both; a begin that comes after its update is over opens nothing."""
    harness = start()
    first, *rest = parts(trainer)
    for _ in range(2):
        assert harness.control(BeginWeightUpdateReqInput, weight_version="v2", update_id="a").success
    assert trainer.send(harness, first, None, "a").success
    assert harness.control(BeginWeightUpdateReqInput, update_id="a").success
    assert update(harness)["received"] == len(first), "nothing has changed"
    assert harness.control(BeginWeightUpdateReqInput, update_id="b").status_code == 409
    for part in rest:
        assert trainer.send(harness, part, None, "a").success
    ended = harness.control(EndWeightUpdateReqInput, update_id="a")
    again = harness.control(EndWeightUpdateReqInput, update_id="a")
    assert ended.success and again.success and again.data == ended.data and again.message == ended.message
    assert harness.scheduler.runner.state.epoch.weight_epoch == 1
    late = harness.control(BeginWeightUpdateReqInput, update_id="a")
    assert late.status_code == 409 and "committed" in late.message
    assert not update(harness)["open"]


def test_a_verify_may_be_repeated_and_a_refused_end_changes_no_label(
    start: Callable[..., Harness], trainer: LoopbackTrainer
) -> None:
    harness = start()
    assert harness.control(BeginWeightUpdateReqInput, weight_version="7", update_id="u").success
    assert trainer.send(harness, None, None, "u").success
    verify = {"update_id": "u", "phase": "verify"}
    first = harness.control(EndWeightUpdateReqInput, **verify)
    for again in (verify, verify | {"weight_version": "7"}):
        answer = harness.control(EndWeightUpdateReqInput, **again)
        assert answer.success and (answer.message, answer.data) == (first.message, first.data)
    wrong = verify | {"expected_lora_checksums": {"none": {}}}
    assert harness.control(EndWeightUpdateReqInput, **wrong).status_code == 400
    for refused in (verify | {"weight_version": "8"}, {"update_id": "u", "weight_version": "8"}):
        answer = harness.control(EndWeightUpdateReqInput, **refused)
        assert answer.status_code == 409 and "already verified" in answer.message
    assert outcome(harness, "u")["outcome"] == "verified" and update(harness)["weight_version"] == "7"
    assert harness.control(EndWeightUpdateReqInput, update_id="u", phase="commit").success
    assert label(harness) == "7"


def test_an_end_names_the_version(start: Callable[..., Harness], trainer: LoopbackTrainer) -> None:
    harness = start()
    assert harness.control(BeginWeightUpdateReqInput, weight_version="7", update_id="u").success
    assert trainer.send(harness, None, None, "u").success
    assert harness.control(EndWeightUpdateReqInput, update_id="u", phase="verify", weight_version="8").success
    assert harness.control(EndWeightUpdateReqInput, update_id="u", phase="commit").success
    assert label(harness) == "8"


# --- what became of it -----------------------------------------------------------------------------------------------


def test_w12_everybody_can_ask_what_became_of_an_update(
    start: Callable[..., Harness], trainer: LoopbackTrainer
) -> None:
    harness = start()
    assert outcome(harness, "a") == {"update_id": "a", "outcome": "unknown", "reason": None}
    harness.control(BeginWeightUpdateReqInput, weight_version="v2", update_id="a")
    assert outcome(harness, "a")["outcome"] == "open"
    assert trainer.send(harness, None, None, "a").success
    assert harness.control(EndWeightUpdateReqInput, update_id="a", phase="verify").success
    assert outcome(harness, "a")["outcome"] == "verified"
    assert harness.control(EndWeightUpdateReqInput, update_id="a", phase="commit").success
    told = outcome(harness, "a")
    assert (told["outcome"], told["weight_version"], told["weight_epoch"]) == ("committed", "v2", 1)
    assert told["content_digest"] == harness.control(GetStateReqInput).data["content_digest"] is not None

    harness.control(BeginWeightUpdateReqInput, update_id="b")
    assert harness.control(AbortWeightUpdateReqInput, update_id="b").success
    assert outcome(harness, "b")["outcome"] == "aborted"
    harness.control(BeginWeightUpdateReqInput, update_id="c")
    assert harness.control(EndWeightUpdateReqInput, update_id="c").status_code == 400
    assert outcome(harness, "c")["outcome"] == "aborted" and "missing" in outcome(harness, "c")["reason"]
    assert trainer.send(harness, parts(trainer)[0]).success, "who is told by its id is not lost"


def test_w12_outcomes_are_remembered_up_to_a_number(start: Callable[..., Harness]) -> None:
    updater = updater_of(start())
    for number in range(1000):
        updater.begin(update_id=f"u{number}", bound=True)
        updater.abort(f"u{number}")
    assert updater.outcome("u999").kind == "aborted" and updater.outcome("u0").kind == "unknown"
    assert len(updater.book._outcomes) <= 256


def test_w23_an_end_after_a_success_blames_no_older_failure(
    start: Callable[..., Harness], trainer: LoopbackTrainer
) -> None:
    harness = start()
    harness.control(BeginWeightUpdateReqInput, weight_version="v2")
    assert "missing" in harness.control(EndWeightUpdateReqInput).message
    assert "missing" in harness.control(EndWeightUpdateReqInput).message
    assert trainer.refresh(harness, "v3").success
    again = harness.control(EndWeightUpdateReqInput)
    assert again.status_code == 409 and "missing" not in again.message and "failed" not in again.message
    assert update(harness)["last_failure"] is None


def test_w19_parts_that_come_by_themselves_say_so(
    start: Callable[..., Harness], trainer: LoopbackTrainer, old: Tensors
) -> None:
    """A label names one content: until every tensor came under it, it states how many did."""
    harness = start()
    first, second, third = parts(trainer)
    total, one, two = len(trainer.tensors), len(first), len(first) + len(second)
    labels = []
    for part in (first, second, third):
        labels.append(trainer.send(harness, part, "7").data["weight_version"])
        assert label(harness) == labels[-1]
    assert labels == [f"7~{one}of{total}", f"7~{two}of{total}", "7"] and serves(harness, trainer.tensors)
    assert trainer.send(harness, first, "8").data["weight_version"] == f"8~{one}of{total}"
    assert trainer.send(harness, first, "8").data["weight_version"] == f"8~{one}of{total}", "a trainer begins anew"
    assert trainer.send(harness, second, "9").data["weight_version"] == f"9~{len(second)}of{total}"
    assert trainer.send(harness, third, "8").data["weight_version"] == f"8~{len(third)}of{total}", "not right before"
    assert trainer.send(harness, None, "8").data["weight_version"] == "8"


# --- pauses ----------------------------------------------------------------------------------------------------------


def test_engine_03_an_older_continue_does_not_undo_a_pause(
    start: Callable[..., Harness], trainer: LoopbackTrainer, monkeypatch: pytest.MonkeyPatch, old: Tensors
) -> None:
    """The older continue waits behind a rendezvous while the pause is answered."""
    harness = start()
    go = threading.Event()
    monkeypatch.setattr(updater_of(harness).groups, "init", lambda **_: go.wait(10))
    assert harness.control(PauseGenerationReqInput).success
    fields = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    joining = harness.post(InitWeightsUpdateGroupReqInput, **fields)
    older = harness.post(ContinueGenerationReqInput)
    harness.tick()
    assert harness.control(PauseGenerationReqInput).data["paused"]
    go.set()
    assert harness.wait(joining).success
    answer = harness.wait(older)
    assert answer.success and answer.data["paused"] and harness.scheduler.serving.is_paused
    first, *rest = parts(trainer)
    assert trainer.send(harness, first, "v2").success
    assert label(harness) == "v1" and serves(harness, old), "half a refresh is not in force"
    for part in rest:
        assert trainer.send(harness, part, "v2").success
    assert harness.control(ContinueGenerationReqInput).data["paused"] is False
    assert label(harness) == "v2" and serves(harness, trainer.tensors)


# --- what to do ------------------------------------------------------------------------------------------------------

KEPT_OUT: dict[str, tuple[type, dict[str, Any]]] = {
    "begin": (BeginWeightUpdateReqInput, {}),
    "disk of another version": (UpdateWeightsFromDiskReqInput, {"model_path": "/nowhere", "weight_version": "B"}),
    "disk": (UpdateWeightsFromDiskReqInput, {"model_path": "/nowhere"}),
    "bucket of another version": (
        UpdateWeightsFromDistributedReqInput,
        {"names": [], "dtypes": [], "shapes": [], "weight_version": "B"},
    ),
    "another update's": (EndWeightUpdateReqInput, {"update_id": "b"}),
    "pull": (
        PullWeightsReqInput,
        {"local_checkpoint_dir": "/tmp/x", "source_dir": "/tmp/y", "target_version": 1, "update_memory": True},
    ),
    "release": (ReleaseMemoryOccupationReqInput, {"tags": ["weights"]}),
    "reset": (WeightsCheckerReqInput, {"action": "reset_tensors"}),
}


@pytest.mark.parametrize("opened_by", ["begin", "begin with an id", "bucket in a pause"])
@pytest.mark.parametrize("call", KEPT_OUT)
def test_who_is_kept_out_is_told_what_to_do(
    start: Callable[..., Harness], trainer: LoopbackTrainer, call: str, opened_by: str
) -> None:
    """E3: the refusal names the lease and the call that drops the open update, with its id where needed."""
    harness = start(enable_memory_saver=True)
    if opened_by == "bucket in a pause":
        assert harness.control(PauseGenerationReqInput).success
        assert trainer.send(harness, parts(trainer)[0], "A").success
    else:
        with_id = {"update_id": "a"} if opened_by == "begin with an id" else {}
        assert harness.control(BeginWeightUpdateReqInput, weight_version="A", **with_id).success
    verb, fields = KEPT_OUT[call]
    refused = harness.control(verb, **fields)
    if (call, opened_by) == ("disk", "begin"):
        assert refused.status_code == 400, "without an id it is of the open update"
        return
    assert refused.status_code == 409 and "left of its lease" in refused.message, refused
    assert "abort_weight_update" in refused.message
    assert ("update_id 'a'" in refused.message) == (opened_by == "begin with an id")
    assert ("continue_generation" in refused.message) == (opened_by == "bucket in a pause")
    told = {"update_id": "a"} if opened_by == "begin with an id" else {}
    assert harness.control(AbortWeightUpdateReqInput, **told).success
    assert harness.control(BeginWeightUpdateReqInput).success


def test_half_an_update_of_which_nobody_said_so_is_counted(
    start: Callable[..., Harness], trainer: LoopbackTrainer
) -> None:
    """D7: an update opened by vLLM's dialect is counted; one declared "partial" gets the given label."""
    harness, names = start(), sorted(trainer.tensors)
    half, total = names[::2], len(names)

    def finish(sent: list[str], **begin: Any) -> Any:
        update_id = uuid.uuid4().hex
        begun = harness.control(BeginWeightUpdateReqInput, update_id=update_id, coverage="partial", **begin)
        assert begun.success, begun.message
        assert trainer.send(harness, sent, update_id=update_id).success
        return harness.control(EndWeightUpdateReqInput, update_id=update_id, weight_version="7")

    first = finish(half, counts_tensors=True)
    assert first.data["weight_version"] == label(harness) == f"7~{len(half)}of{total}"
    assert f"{len(half)} of {total} tensors came" in first.message
    assert finish(sorted(set(names) - set(half)), counts_tensors=True).data["weight_version"] == "7"
    assert finish(half[:3]).data["weight_version"] == "7", "its sender said that it is a part"
    assert finish(names, counts_tensors=True).message.endswith("updated to 7.")

"""A pause that waits: requests that have begun end, no other begins, and every waiting call gets an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetStateReqInput,
    GiveUpPauseReqInput,
    PauseGenerationReqInput,
)
from rollout.core.messages.weights import UpdateWeightsFromDistributedReqInput
from tests.late_loop import captured_loop  # noqa: F401
from tests.local_refresh import updater_of
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "dense")


def begun(folder: Path, *lengths: int, **settings: Any) -> Harness:
    """Return an engine with requests "0", "1", ... of `lengths` new tokens, after three steps."""
    harness = Harness(folder, enable_return_routed_experts=False, **settings)
    for number, length in enumerate(lengths):
        harness.submit([5, 9, 2 + number], rid=str(number), params={"max_new_tokens": length})
    for _ in range(3):
        harness.tick()
    return harness


def wait_pause(harness: Harness, **fields: Any) -> str:
    return harness.post(PauseGenerationReqInput, mode="wait", **fields)


def reason(harness: Harness, rid: str) -> str | None:
    finished = harness.results[rid].finished
    return None if finished is None else finished.reason.type


def test_what_has_begun_ends_and_what_comes_waits(folder: Path) -> None:
    harness = begun(folder, 6, 12)
    verb = wait_pause(harness)
    harness.tick()
    assert harness.control(GetStateReqInput).data["paused"], "as of the call"
    harness.submit([7, 7], rid="late", params={"max_new_tokens": 3})
    answer = harness.wait(verb)
    assert answer.success and answer.data["paused"] and answer.data["num_running"] == 0
    assert answer.data["num_waiting"] == 1
    assert [reason(harness, rid) for rid in ("0", "1", "late")] == ["length", "length", None]
    assert len(harness.results["1"].token_ids) == 12
    for _ in range(3):
        assert not harness.tick()
    assert harness.control(ContinueGenerationReqInput).success
    harness.run()
    assert reason(harness, "late") == "length"
    harness.check_idle()


def test_an_idle_engine_pauses_at_once(folder: Path) -> None:
    harness = begun(folder)
    assert harness.control(PauseGenerationReqInput, mode="wait").success
    assert harness.control(PauseGenerationReqInput, mode="wait").success
    assert not harness.scheduler.has_work and harness.scheduler.serving.is_paused


def test_a_request_that_was_retracted_has_begun(folder: Path) -> None:
    """One that gave its KV back, for lack of memory or by another pause, ends before the pause; one that never ran
    does not begin."""
    harness = begun(folder, 8, max_running_requests=1)
    harness.submit([4, 4], rid="late", params={"max_new_tokens": 3})
    harness.control(PauseGenerationReqInput, mode="retract")
    answer = harness.control(PauseGenerationReqInput, mode="wait")
    assert answer.success and answer.data["num_waiting"] == 1
    assert reason(harness, "0") == "length" and harness.results["0"].finished.num_retractions == 1
    assert reason(harness, "late") is None


def test_what_a_pause_in_place_holds_runs_to_its_end(folder: Path) -> None:
    harness = begun(folder, 8)
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    assert harness.control(PauseGenerationReqInput, mode="wait").success
    assert reason(harness, "0") == "length"


def test_it_gives_up_and_generation_goes_on(folder: Path) -> None:
    harness = begun(folder, 2000)
    harness.submit([4, 4], rid="late", params={"max_new_tokens": 3})
    answer = harness.control(PauseGenerationReqInput, mode="wait", wait_s=0.05)
    assert answer.status_code == 409 and "1 requests have not ended within 0.05 s" in answer.message
    assert not harness.control(GetStateReqInput).data["paused"]
    while reason(harness, "late") is None:
        assert harness.tick()


@pytest.mark.parametrize("mode", [None, "abort", "retract", "in_place"])
def test_who_continues_or_pauses_otherwise_ends_the_wait(folder: Path, mode: str | None) -> None:
    harness = begun(folder, 2000)
    first, second = wait_pause(harness), wait_pause(harness)
    harness.tick()
    if mode is None:
        assert harness.control(ContinueGenerationReqInput).success
    else:
        assert harness.control(PauseGenerationReqInput, mode=mode).success
    answers = [harness.wait(verb) for verb in (first, second)]
    assert [answer.success for answer in answers] == [mode == "abort"] * 2
    if mode != "abort":
        assert "before requests had ended" in answers[0].message and answers[0].status_code == 409
    assert harness.control(GetStateReqInput).data["paused"] == (mode is not None)


def test_a_continue_from_before_does_not_end_it(folder: Path) -> None:
    """The later call decides, as in the other modes."""
    harness = begun(folder, 8)
    resumed = harness.post(ContinueGenerationReqInput)
    verb = wait_pause(harness)
    assert harness.wait(resumed).data["paused"] is True
    assert harness.wait(verb).success and harness.scheduler.serving.is_paused


def test_who_gives_up_takes_only_the_own_pause_back(folder: Path) -> None:
    harness = begun(folder, 2000)
    first, second = wait_pause(harness, wait_id="a"), wait_pause(harness, wait_id="b")
    harness.tick()
    assert harness.control(GiveUpPauseReqInput, wait_id="a").success
    answer = harness.wait(first)
    assert answer.status_code == 409 and "given up" in answer.message
    assert harness.control(GetStateReqInput).data["paused"], "the other one still waits"
    assert harness.control(GiveUpPauseReqInput, wait_id="b").success
    assert not harness.wait(second).success and not harness.control(GetStateReqInput).data["paused"]
    assert harness.tick() and reason(harness, "0") is None


@pytest.mark.parametrize("paused", [False, True])
def test_a_pause_that_came_can_be_given_up_until_another_one_comes(folder: Path, paused: bool) -> None:
    """A pause is given up where one replica has paused and another could not."""
    harness = begun(folder, 4)
    assert harness.control(PauseGenerationReqInput, mode="wait", wait_id="a").success
    if paused:
        assert harness.control(PauseGenerationReqInput, mode="in_place").success
    assert harness.control(GiveUpPauseReqInput, wait_id="a").success
    assert harness.control(GiveUpPauseReqInput, wait_id="nobody's").success
    assert harness.control(GetStateReqInput).data["paused"] == paused


def test_a_wait_that_fails_leaves_the_pause_before_it(folder: Path) -> None:
    harness = begun(folder, 2000)
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    answer = harness.control(PauseGenerationReqInput, mode="wait", wait_s=0.05)
    assert answer.status_code == 409 and "stays paused, as it was" in answer.message
    assert harness.control(GetStateReqInput).data["paused"] and not harness.tick()


def sends_a_part(folder: Path, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> ControlReqOutput:
    """Send a bucket of one tensor without a begin, and return the answer."""
    trainer = LoopbackTrainer(logical_tensors(folder))
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    return trainer.send(harness, sorted(trainer.tensors)[:1])


def test_amid_an_update_without_begin_generation_goes_on_for_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = begun(folder)
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    assert sends_a_part(folder, harness, monkeypatch).success
    answer = harness.control(PauseGenerationReqInput, mode="wait")
    assert answer.status_code == 409 and "settle it with continue_generation" in answer.message
    assert updater_of(harness).is_open and harness.control(GetStateReqInput).data["paused"]


def test_buckets_of_a_pause_that_is_coming_are_not_committed_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = begun(folder, 2000)
    verb = wait_pause(harness, wait_s=0.5)
    harness.tick()
    assert sends_a_part(folder, harness, monkeypatch).success
    assert harness.scheduler.runner.state.epoch.weight_epoch == 0 and updater_of(harness).is_open
    assert not harness.wait(verb).success, "the request goes on for longer"
    assert not updater_of(harness).is_open and harness.scheduler.runner.state.epoch.weight_epoch == 0

"""Ranks that are late, refuse, or cannot go on: all serve one version, or the engine ends with the reason.

A thread is a rank, over real gloo groups with short deadlines.  What ends a scheduler's loop comes out of `tick`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.placement_adoption import PlacementAdoption
from rollout.core.errors import LockstepError
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetStateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightVersionReqInput,
)
from rollout.distributed.communicator import RankLostError
from rollout.tokenizer_manager.communicator import Communicator, SchedulerTimeout
from tests import parallel_harness
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from tests.unit.control.test_parallel_refresh import check_content, control_of, refresh, send
from weight_sync.in_model import JournalStaging
from weight_sync.transaction import WeightTransaction
from weight_sync.updater import WeightUpdater

pytestmark = pytest.mark.full

Tensors = dict[str, torch.Tensor]
PROMPT = [7, 3, 9]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("old") / "m", "moe_dense_first", seed=5)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("new") / "m", "moe_dense_first", seed=6)
    return {name: tensor.double() for name, tensor in logical_tensors(folder).items()}


@pytest.fixture
def start(old: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ParallelHarness]]:
    """A function that starts an engine.

    `breaks`: the test gives up collectives, which gloo keeps alive up to its own deadline.
    """
    started = []

    def start(breaks: bool = False, **settings: Any) -> ParallelHarness:
        monkeypatch.setattr(parallel_harness, "COLLECTIVE_S", 8.0 if breaks else 30.0)
        started.append(ParallelHarness(old, **settings))
        return started[-1]

    yield start
    for harness in started:
        harness.close()


def updaters(harness: ParallelHarness) -> list[WeightUpdater]:
    return [control_of(scheduler)._updater for scheduler in harness.schedulers]


def labels(harness: ParallelHarness) -> set[str]:
    return {scheduler.runner.state.epoch.weight_version for scheduler in harness.schedulers}


def begun(harness: Harness, new: Tensors, **fields: Any) -> None:
    """Begin an update and send all of its tensors, but do not end it."""
    answer = harness.control(BeginWeightUpdateReqInput, weight_version="v1", **fields)
    assert answer.success, answer.message
    assert all(answer.success for answer in send(harness, new))  # type: ignore[arg-type]


# --- W1, W18: a late vote --------------------------------------------------------------------------------------------

DEADLINE_S = 2.0
ARRIVALS_S = (0.0, 0.95, 1.2, 2.25)  # the last one after the deadline of the first, and not of the others


def late(calls: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        time.sleep(seconds)
        return calls(*arguments)

    return call


@pytest.mark.parametrize("layout", [{"tp_size": 4}, {"dp_size": 3}], ids=["4 ranks", "3 replicas"])
def test_w01_a_late_commit_vote_ends_the_engine(
    start: Callable[..., ParallelHarness], new: Tensors, layout: dict[str, int]
) -> None:
    """One rank has given up when the last one comes, and the others get an answer."""
    harness = start(breaks=True, **layout)
    begun(harness, new)
    harness.shorten_deadlines(DEADLINE_S)
    ranks = updaters(harness)
    for updater, seconds in zip(ranks, ARRIVALS_S[-len(ranks) :] if len(ranks) == 4 else (0.0, 1.2, 2.25)):
        updater._commit_vote = late(updater._commit_vote, seconds)
    verb = harness.post(EndWeightUpdateReqInput)
    with pytest.raises(RankLostError):
        harness.wait(verb)
    assert verb not in harness.answers


def test_w01_ranks_that_serve_different_versions_end_at_once(start: Callable[..., ParallelHarness]) -> None:
    harness = start(breaks=True, tp_size=2)
    harness.tick()
    harness.shorten_deadlines(1.0)
    state = harness.schedulers[1].runner.state
    with state.mutate("a bug"):
        state.relabel("another")
    harness.submit(PROMPT, params={"max_new_tokens": 2})
    with pytest.raises(LockstepError):
        harness.tick()
    assert not any(result.token_ids for result in harness.results.values())


def test_w01_replicas_that_serve_different_versions_end_at_the_next_verb(
    start: Callable[..., ParallelHarness], new: Tensors
) -> None:
    harness = start(breaks=True, dp_size=2)
    harness.shorten_deadlines(1.0)
    state = harness.schedulers[1].runner.state
    with state.mutate("a bug"):
        state.relabel("another")
    with pytest.raises(LockstepError, match="not at the same weight verb"):
        harness.control(BeginWeightUpdateReqInput)


def test_w18_a_failed_vote_of_receiving_threads_ends_the_engine(
    start: Callable[..., ParallelHarness], new: Tensors
) -> None:
    """The engine could never be refreshed again, so it stops serving."""
    harness = start(breaks=True, tp_size=2)
    begun(harness, new)
    for scheduler in harness.schedulers:
        scheduler.parallel.weight_io.timeout_s = 0.5
        scheduler.parallel.tp.timeout_s = 5.0
    updater = updaters(harness)[1]
    updater._vote = late(updater._vote, 1.5)
    with pytest.raises(RankLostError, match="weight_io"):
        harness.control(EndWeightUpdateReqInput)
    assert labels(harness) == {"default"}


# --- W2: leases ------------------------------------------------------------------------------------------------------


def test_w02_a_lease_runs_out_on_all_ranks_at_once(
    start: Callable[..., ParallelHarness], new: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is slow to refuse a bucket; then the trainer dies."""
    harness = start(tp_size=2)
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v1", lease_s=1.0).success
    update = updaters(harness)[1].update
    assert update is not None
    slow = update.transaction
    announce = WeightTransaction.announce

    def announcing(self: WeightTransaction, *arguments: Any) -> None:
        time.sleep(0.4 * (self is slow))
        announce(self, *arguments)

    monkeypatch.setattr(WeightTransaction, "announce", announcing)
    name = next(iter(new))
    (answer,) = send(harness, {name: torch.full_like(new[name], torch.nan)}, parts=1)
    assert not answer.success
    assert len({updater.lease_deadline for updater in updaters(harness)}) == 1
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        harness.tick()
        assert len({updater.is_open for updater in updaters(harness)}) == 1
    assert not updaters(harness)[0].is_open
    monkeypatch.undo()
    assert refresh(harness, new, "v2").success


# --- W3: replicas ----------------------------------------------------------------------------------------------------


def test_w03_a_verb_that_one_replica_cannot_plan_is_refused_by_all(
    start: Callable[..., ParallelHarness], new: Tensors
) -> None:
    harness = start(dp_size=2, enable_memory_saver=True)
    harness.submit(PROMPT, params={"max_new_tokens": 8}, dp_rank=0)
    harness.tick()
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    refused = harness.wait(harness.post(ReleaseMemoryOccupationReqInput))
    assert refused.status_code == 409 and "1 requests running" in refused.message
    assert harness.control(ContinueGenerationReqInput).success
    harness.run()
    assert refresh(harness, new, "v1").success
    check_content(harness, {})
    assert labels(harness) == {"v1"}


def test_w03_replicas_in_different_states_refuse_a_bucket(start: Callable[..., ParallelHarness], new: Tensors) -> None:
    """A pause may reach one replica within the job before: one would commit the bucket, the other keep it."""
    harness = start(dp_size=2)
    harness.schedulers[0].serving.pause()
    (answer,) = send(harness, new, parts=1)
    assert answer.status_code == 409 and "different states" in answer.message, answer.message
    assert labels(harness) == {"default"}
    harness.control(AbortWeightUpdateReqInput)
    assert refresh(harness, new, "v1").success
    assert labels(harness) == {"v1"}


@pytest.mark.parametrize("victim", [0, 1])
def test_w03_a_commit_that_one_replica_cannot_start_is_voted_down(
    start: Callable[..., ParallelHarness], new: Tensors, victim: int
) -> None:
    harness = start(dp_size=2)
    begun(harness, new)
    assert harness.control(EndWeightUpdateReqInput, phase="verify").success
    updaters(harness)[victim].drop("it was lost here")
    answer = harness.wait(harness.post(EndWeightUpdateReqInput, phase="commit"))
    assert not answer.success
    assert labels(harness) == {"default"}
    assert refresh(harness, new, "v2").success


# --- W8: between the vote and the new version ------------------------------------------------------------------------


def test_w08_no_thread_to_be_had_does_not_stop_a_commit(
    old: Path, new: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(old, dtype="float64")
    begun(harness, new)

    class NoThreads:
        class Thread(threading.Thread):
            def start(self) -> None:
                raise RuntimeError("can't start new thread")

    monkeypatch.setattr("weight_sync.held_memory.threading", NoThreads)
    answer = harness.control(EndWeightUpdateReqInput)
    assert answer.success, answer.message
    assert harness.control(GetStateReqInput).data["weight_version"] == "v1"
    for version in ("v2", "v3"):
        assert refresh(harness, new, version).success  # type: ignore[arg-type]


def test_w08_what_fails_after_the_vote_ends_the_engine(
    old: Path, new: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New content is in the model, but no label names it: nothing may be sampled."""
    harness = Harness(old, dtype="float64")
    begun(harness, new)

    def adopt(_: PlacementAdoption) -> None:
        raise MemoryError("no room for a map")

    monkeypatch.setattr(PlacementAdoption, "adopt", adopt)
    with pytest.raises(LockstepError, match="in doubt: MemoryError: no room for a map"):
        harness.control(EndWeightUpdateReqInput)


# --- W11: deadlines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [BeginWeightUpdateReqInput, PauseGenerationReqInput], ids=["queued", "at once"])
def test_w11_what_was_given_up_is_not_done(old: Path, verb: type) -> None:
    harness = Harness(old)
    sent: list[Any] = []
    with pytest.raises(SchedulerTimeout) as gave_up:
        asyncio.run(Communicator(sent.append).call(verb, 0.05))
    harness.channel.inbox.append(sent[0])
    answer: ControlReqOutput = harness.wait(sent[0].request_id)
    assert not answer.success and answer.status_code == 504
    state = harness.control(GetStateReqInput).data
    assert state["weight_update"]["open"] is False and not state["paused"]
    assert "A call that still waits has no effect" in str(gave_up.value)


def test_w11_one_replica_that_is_late_drops_the_verb_for_all(start: Callable[..., ParallelHarness]) -> None:
    harness = start(dp_size=2)
    slow = harness.schedulers[1]
    now = slow._channel.now
    monkey = pytest.MonkeyPatch()
    monkey.setattr(type(slow._channel), "now", property(lambda self: now + 60.0 * (self is slow._channel)))
    answer = harness.control(UpdateWeightVersionReqInput, new_version="late", deadline=now + 30.0)
    monkey.undo()
    assert answer.status_code == 504
    assert labels(harness) == {"default"}


# --- W25: a full disk ------------------------------------------------------------------------------------------------


def test_w25_a_full_journal_disk_says_what_serves(old: Path, new: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(old, dtype="float64", weight_staging="journal")
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v1").success
    monkeypatch.setattr(JournalStaging, "_keep", full_disk)
    answers = send(harness, new)  # type: ignore[arg-type]
    assert answers[0].status_code == 500
    assert "No space left on device" in answers[0].message and "the old weights were restored" in answers[0].message
    monkeypatch.undo()
    assert harness.control(AbortWeightUpdateReqInput).success
    assert refresh(harness, new, "v2").success  # type: ignore[arg-type]


def full_disk(self: JournalStaging, live: torch.Tensor) -> None:
    raise OSError(28, "No space left on device")

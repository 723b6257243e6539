"""Weights that an update in place has torn: no step reads them, by whichever way generation goes on.

Ranks find it in the same turn.  The answer to an abort states what serves, in every staging mode.
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

from rollout.control.lease_monitor import LeaseMonitor
from rollout.control.weight_control import WeightControl
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    GiveUpPauseReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness, control_of
from tests.scheduler_harness import Harness
from weight_sync.updater import WeightUpdater

PROMPT = [7, 3, 9]
NORM = "model.norm.weight"
IN_PLACE = "overwritten in place"
Tensors = dict[str, torch.Tensor]
RANKS = pytest.mark.parametrize("engine", ["one rank", "two ranks"], indirect=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


@pytest.fixture(scope="module")
def tensors(folder: Path) -> Tensors:
    return {name: tensor.double() * 1.5 for name, tensor in logical_tensors(folder).items()}


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Callable[[str], Harness]]:
    """A function that returns the engine of one rank or of two; each is started once."""
    started: dict[str, Harness] = {}

    def engine(ranks: str) -> Harness:
        if ranks not in started:
            settings: dict[str, Any] = {"weight_staging": "in_place", "enable_memory_saver": True}
            started[ranks] = (
                Harness(folder, dtype="float64", num_threads=1, **settings)
                if ranks == "one rank"
                else ParallelHarness(folder, tp_size=2, **settings)
            )
        return started[ranks]

    yield engine
    for harness in started.values():
        if isinstance(harness, ParallelHarness):
            harness.close()


@pytest.fixture
def engine(engines: Callable[[str], Harness], tensors: Tensors, request: pytest.FixtureRequest) -> Iterator[Harness]:
    harness = engines(request.param)
    yield harness
    vars(harness).pop("tick", None)
    harness.control(AbortWeightUpdateReqInput)
    assert harness.control(PauseGenerationReqInput, mode="abort").success
    assert bucket(harness, tensors).success
    assert harness.control(ContinueGenerationReqInput).success, "a complete refresh heals"
    assert len(harness.generate([PROMPT], {"max_new_tokens": 2})[0].token_ids) == 2
    assert poisoned(harness) == {None}


def schedulers(harness: Harness) -> list[Any]:
    return harness.schedulers if isinstance(harness, ParallelHarness) else [harness.scheduler]


def poisoned(harness: Harness) -> set[str | None]:
    return {scheduler.serving.poisoned for scheduler in schedulers(harness)}


def bucket(harness: Harness, named: Tensors, **fields: Any) -> ControlReqOutput:
    payload = bytearray(save({name: tensor.contiguous() for name, tensor in named.items()}))
    return harness.control(UpdateWeightsFromTensorReqInput, payload=payload, format="safetensors", **fields)


def pause(harness: Harness, mode: str = "in_place", **fields: Any) -> None:
    assert harness.control(PauseGenerationReqInput, mode=mode, **fields).success


def write_part(harness: Harness, tensors: Tensors) -> None:
    """Write one tensor without a begin; from now on no step may run."""
    assert bucket(harness, {NORM: tensors[NORM]}).success
    assert all(scheduler.serving.is_writing for scheduler in schedulers(harness))
    tick = harness.tick

    def watched() -> bool:
        assert not tick(), "a step ran on torn weights"
        assert len({reason is None for reason in poisoned(harness)}) == 1, "ranks found it in different turns"
        return False

    harness.tick = watched  # type: ignore[method-assign]


def begun(harness: Harness) -> str:
    """Return a long request that has begun."""
    rid = harness.submit(PROMPT, params={"max_new_tokens": 2000})
    for _ in range(3):
        harness.tick()
    return rid


# --- the ways in which generation goes on -----------------------------------------------------------------------------


def a_wait_ends(harness: Harness, tensors: Tensors) -> None:
    verb = harness.post(PauseGenerationReqInput, mode="wait", wait_s=1.0)
    harness.tick()
    write_part(harness, tensors)
    assert "generation goes on" in harness.wait(verb).message


def a_caller_goes_away(harness: Harness, tensors: Tensors) -> None:
    harness.post(PauseGenerationReqInput, mode="wait", wait_id="a")
    harness.tick()
    write_part(harness, tensors)
    assert harness.control(GiveUpPauseReqInput, wait_id="a").success


def a_caller_goes_away_later(harness: Harness, tensors: Tensors) -> None:
    """Give up a pause that has come."""
    harness.control(PauseGenerationReqInput, mode="abort")
    harness.control(ContinueGenerationReqInput)
    pause(harness, "wait", wait_id="a")
    write_part(harness, tensors)
    assert not harness.control(GiveUpPauseReqInput, wait_id="a").data["paused"]


def a_caller_goes_away_amid_a_bucket(harness: Harness, tensors: Tensors) -> None:
    """Give up a pause while a verb is under way."""
    may_end, receive = threading.Event(), WeightUpdater.receive

    def receives(self: WeightUpdater, *arguments: Any) -> None:
        assert may_end.wait(30.0)
        receive(self, *arguments)

    harness.post(PauseGenerationReqInput, mode="wait", wait_id="a")
    harness.tick()
    write_part(harness, tensors)
    payload = bytearray(save({"lm_head.weight": tensors["lm_head.weight"]}))
    with pytest.MonkeyPatch.context() as late:
        late.setattr(WeightUpdater, "receive", receives)
        verb = harness.post(UpdateWeightsFromTensorReqInput, payload=payload, format="safetensors")
        harness.tick()
        assert harness.control(GiveUpPauseReqInput, wait_id="a").success
        may_end.set()
        assert harness.wait(verb).success


def a_pause_times_out(harness: Harness, tensors: Tensors) -> None:
    with pytest.MonkeyPatch.context() as short:
        for scheduler in schedulers(harness):
            short.setattr(control_of(scheduler)._leases, "_pause_timeout_s", 1.0)
        pause(harness)
    write_part(harness, tensors)
    time.sleep(1.1)
    harness.tick()


def a_continue(harness: Harness, tensors: Tensors) -> None:
    pause(harness)
    write_part(harness, tensors)
    assert harness.control(ContinueGenerationReqInput).status_code == 400, "tensors are missing"
    assert harness.control(ContinueGenerationReqInput).success


def an_abort(harness: Harness, tensors: Tensors) -> None:
    pause(harness)
    write_part(harness, tensors)
    aborted = harness.control(AbortWeightUpdateReqInput)
    assert aborted.success and "the weights are poisoned" in aborted.message and IN_PLACE in aborted.message
    assert harness.control(ContinueGenerationReqInput).success


def an_end(harness: Harness, tensors: Tensors) -> None:
    pause(harness)
    write_part(harness, tensors)
    assert not harness.control(EndWeightUpdateReqInput).success
    assert harness.control(ContinueGenerationReqInput).success


def another_pause(harness: Harness, tensors: Tensors) -> None:
    """Pause again; the next bucket is refused, and drops the update of the first pause."""
    pause(harness)
    write_part(harness, tensors)
    pause(harness, "retract")
    assert not bucket(harness, {NORM: torch.full_like(tensors[NORM], torch.nan)}).success
    harness.control(AbortWeightUpdateReqInput)
    assert harness.control(ContinueGenerationReqInput).success


def released_memory(harness: Harness, tensors: Tensors) -> None:
    """Release and resume the weights once the update is aborted."""
    pause(harness, "retract")
    write_part(harness, tensors)
    assert harness.control(ReleaseMemoryOccupationReqInput).status_code == 409
    assert harness.control(AbortWeightUpdateReqInput).success
    assert harness.control(ReleaseMemoryOccupationReqInput).success
    assert harness.control(ResumeMemoryOccupationReqInput).success
    assert harness.control(ContinueGenerationReqInput).success


WITHOUT_A_VERB = [a_wait_ends, a_caller_goes_away, a_caller_goes_away_later, a_pause_times_out]
WAYS = [
    *WITHOUT_A_VERB,
    a_caller_goes_away_amid_a_bucket,
    a_continue,
    an_abort,
    an_end,
    another_pause,
    released_memory,
]


def tear(harness: Harness, tensors: Tensors, way: Callable[[Harness, Tensors], None]) -> None:
    rid = begun(harness)
    way(harness, tensors)
    harness.tick()
    assert all(reason is not None and IN_PLACE in reason for reason in poisoned(harness)), poisoned(harness)
    late = harness.submit(PROMPT, params={"max_new_tokens": 2})
    harness.run()
    assert harness.results[late].finished.reason.status_code == 503  # type: ignore[union-attr]
    assert harness.results[rid].finished is not None


@RANKS
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_step_runs_on_torn_weights(
    engine: Harness, tensors: Tensors, way: Callable[[Harness, Tensors], None]
) -> None:
    tear(engine, tensors, way)


@pytest.mark.mutant
@RANKS
@pytest.mark.parametrize("way", WITHOUT_A_VERB, ids=lambda way: way.__name__)
def test_an_engine_that_asks_after_verbs_alone_is_noticed(
    engine: Harness, tensors: Tensors, way: Callable[[Harness, Tensors], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = property(lambda self: self._updater.update, lambda self, update: None)
    monkeypatch.setattr(LeaseMonitor, "_checked", seen, raising=False)
    with pytest.raises(AssertionError, match=r"a step ran on torn weights|^{None}"):
        tear(engine, tensors, way)


@pytest.mark.mutant
@RANKS
def test_an_update_that_outlives_its_pause_is_noticed(
    engine: Harness, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the steps until its lease ends."""
    monkeypatch.setattr(WeightControl, "_drop_given_up", lambda self: None)
    with pytest.raises(AssertionError, match=r"^{None}"):
        tear(engine, tensors, a_caller_goes_away_amid_a_bucket)


# --- the answer to an abort -------------------------------------------------------------------------------------------


@RANKS
def test_an_abort_says_what_is_left_of_the_weights(engine: Harness, tensors: Tensors) -> None:
    """It is what all ranks have: here another one's weights are torn, and none of the first."""
    assert engine.control(BeginWeightUpdateReqInput).success
    assert engine.control(AbortWeightUpdateReqInput).message == "Weight update aborted; the previous weights serve."
    target = control_of(schedulers(engine)[-1])._updater.model
    target.torn = "a page was lost"
    assert engine.control(BeginWeightUpdateReqInput, update_id="another").success
    aborted = engine.control(EndWeightUpdateReqInput, update_id="another", abort=True)
    text = "Weight update aborted; the weights are poisoned: a page was lost; send a complete refresh."
    assert aborted.success and aborted.message == text
    for _ in range(2):  # poisoned before it began
        assert engine.control(BeginWeightUpdateReqInput).success
        assert engine.control(AbortWeightUpdateReqInput).message == text
    assert engine.control(PauseGenerationReqInput).success


def test_an_abort_says_which_replica_has_torn_weights(folder: Path) -> None:
    with ParallelHarness(folder, dp_size=2) as harness:
        assert harness.control(BeginWeightUpdateReqInput).success
        control_of(harness.schedulers[1])._updater.model.torn = "a page was lost"
        whole, torn = harness.control(AbortWeightUpdateReqInput).message.split(" | ")
    assert whole == "data-parallel rank 0: Weight update aborted; the previous weights serve."
    poisoned = "Weight update aborted; the weights are poisoned: a page was lost; send a complete refresh."
    assert torn == f"data-parallel rank 1: {poisoned}"


def test_an_abort_after_a_release_says_that_nothing_serves(folder: Path, tensors: Tensors) -> None:
    harness = Harness(folder, dtype="float64", num_threads=1, enable_memory_saver=True)
    assert harness.control(ReleaseMemoryOccupationReqInput, tags=["weights"]).success
    assert harness.control(ResumeMemoryOccupationReqInput).success
    assert harness.control(BeginWeightUpdateReqInput).success and bucket(harness, {NORM: tensors[NORM]}).success
    aborted = harness.control(AbortWeightUpdateReqInput)
    assert "nothing serves: the weights were released and have no content" in aborted.message


@pytest.mark.parametrize("staging", ["host", "device", "journal"])
def test_an_abort_in_other_modes_leaves_the_previous_weights(folder: Path, tensors: Tensors, staging: str) -> None:
    harness = Harness(folder, dtype="float64", num_threads=1, weight_staging=staging)
    assert harness.control(BeginWeightUpdateReqInput).success and bucket(harness, tensors).success
    assert harness.control(AbortWeightUpdateReqInput).message == "Weight update aborted; the previous weights serve."
    weights = harness.scheduler.runner.state.model.weights
    for name, tensor in logical_tensors(folder).items():
        assert all(torch.equal(place.read(), tensor.double()) for place in weights.places(name))

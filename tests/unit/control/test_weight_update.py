"""Weight updates on a real scheduler: fences, leases, pauses without a continue, staging modes while requests run.

Tensors are handed in where a process group would deliver them; everything after that is the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    FlushCacheReqInput,
    GetStateReqInput,
    PauseGenerationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightVersionReqInput,
    WeightsCheckerReqInput,
)
from tests.late_loop import captured_loop  # noqa: F401
from tests.loopback_updater import LoopbackSource
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import TensorMeta, dtype_name

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEW_TOKENS = 120  # more steps than the verbs of a test take turns
MODES: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("models")
    old, new = (tiny_checkpoint(base / f"v{seed}", "moe_dense_first", seed=seed) for seed in (1, 2))
    return old, new


@pytest.fixture
def old(folders: tuple[Path, Path]) -> Tensors:
    return logical_tensors(folders[0])


@pytest.fixture
def new(folders: tuple[Path, Path]) -> Tensors:
    return logical_tensors(folders[1])


class Trainer:
    """A client: what it sends, and what it gets back."""

    def __init__(self, harness: Harness, on_the_wire: Tensors) -> None:
        self.harness = harness
        self._on_the_wire = on_the_wire

    def __call__(self, verb: type, **fields: Any) -> ControlReqOutput:
        return self.harness.control(verb, **fields)

    def ok(self, verb: type, **fields: Any) -> dict[str, Any]:
        answer = self(verb, **fields)
        assert answer.success, answer.message
        return answer.data

    def bucket(self, tensors: Tensors, **fields: Any) -> ControlReqOutput:
        self._on_the_wire.clear()
        self._on_the_wire.update(tensors)
        return self(
            UpdateWeightsFromDistributedReqInput,
            names=list(tensors),
            dtypes=[dtype_name(tensor.dtype) for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            **fields,
        )

    def buckets(self, tensors: Tensors, **fields: Any) -> None:
        for part in halves(tensors):
            answer = self.bucket(part, **fields)
            assert answer.success, answer.message

    def update(self) -> dict[str, Any]:
        return self.ok(GetStateReqInput)["weight_update"]

    def digest(self) -> str:
        return self.ok(WeightsCheckerReqInput)["digest"]

    def state(self) -> dict[str, Any]:
        return self.ok(GetStateReqInput)


@pytest.fixture
def engine(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """An engine on the old weights, with two requests under way."""
    on_the_wire: Tensors = {}
    monkeypatch.setitem(
        SOURCES,
        UpdateWeightsFromDistributedReqInput,
        lambda verb, updater: LoopbackSource([(name, on_the_wire[name]) for name in verb.lists()[0]]),
    )

    def start(**settings: Any) -> Trainer:
        harness = Harness(folders[0], weight_version="v1", **settings)
        for rid in ("run0", "run1"):
            harness.submit(PROMPT, rid=rid, params={"max_new_tokens": NEW_TOKENS})
        for _ in range(5):
            harness.tick()
        return Trainer(harness, on_the_wire)

    return start


def halves(tensors: Tensors) -> list[Tensors]:
    """Split tensors into two buckets by every other name, which cuts through fused tensors."""
    names = sorted(tensors)
    return [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]


def digest_of(tensors: Tensors) -> str:
    return digest((TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in tensors.items())


def check_old_serves(trainer: Trainer, old: Tensors) -> None:
    """Check that the old bits and the old label serve, and that requests end on them."""
    assert trainer.digest() == digest_of(old)
    assert trainer.state()["weight_version"] == "v1"
    trainer.harness.run()
    for rid in ("run0", "run1"):
        assert trainer.harness.results[rid].versions == [("v1", 0, NEW_TOKENS)]


def refresh(trainer: Trainer, tensors: Tensors, label: str) -> None:
    trainer.ok(BeginWeightUpdateReqInput, weight_version=label)
    trainer.buckets(tensors)
    assert trainer.ok(EndWeightUpdateReqInput)["weight_version"] == label
    assert trainer.digest() == digest_of(tensors)


# --- the start of an update ------------------------------------------------------------------------------------------


def test_a_wrong_starting_point_is_refused_before_a_byte(
    engine: Callable[..., Trainer], old: Tensors, new: Tensors
) -> None:
    trainer = engine()
    for wrong in (
        {"base_version": "v0"},
        {"base_digest": digest_of(new)},
        {"base_version": "v1", "base_digest": "0"},
    ):
        answer = trainer(BeginWeightUpdateReqInput, weight_version="v2", **wrong)
        assert not answer.success and answer.status_code == 409 and "in force" in answer.message
        assert not trainer.update()["open"]
    assert trainer.state()["content_digest"] == digest_of(old), "what was computed is kept"
    trainer.ok(BeginWeightUpdateReqInput, base_version="v1", base_digest=digest_of(old).upper(), weight_version="v2")
    trainer.buckets(new)
    trainer.ok(EndWeightUpdateReqInput)
    assert trainer(BeginWeightUpdateReqInput, base_version="v1").status_code == 409
    trainer.ok(BeginWeightUpdateReqInput, base_version="v2", base_digest=digest_of(new))


def test_the_state_of_an_update(engine: Callable[..., Trainer], old: Tensors, new: Tensors) -> None:
    trainer = engine()
    assert not trainer.update()["open"]
    trainer.ok(BeginWeightUpdateReqInput, weight_version="v2", lease_s=50)
    first, second = halves(new)
    assert trainer.bucket(first).success
    update = trainer.update()
    assert (update["open"], update["state"], update["weight_version"]) == (True, "open", "v2")
    assert (update["received"], update["missing"]) == (len(first), len(second))
    assert update["missing_names"] == sorted(second)[:10] and update["received_names"] == sorted(first)[:10]
    assert update["num_bytes"] == sum(tensor.nbytes for tensor in first.values())
    assert 40 < update["lease_left_s"] <= update["lease_s"] == 50
    bad = trainer.bucket({"ghost": torch.zeros(1)})
    assert bad.status_code == 400
    assert trainer.update()["state"] == "failed" and "ghost" in trainer.update()["failed"]
    assert trainer(EndWeightUpdateReqInput).status_code == 409
    update = trainer.update()
    assert not update["open"] and "ghost" in update["last_failure"]["reason"]
    assert update["last_failure"]["weight_version"] == "v2" and not update["busy"]
    check_old_serves(trainer, old)


# --- leases and pauses -----------------------------------------------------------------------------------------------


def wait_until(trainer: Trainer, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while not condition(trainer.update()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return trainer.update()


@pytest.mark.parametrize("mode", ["host", "journal"])
def test_a_trainer_that_died_never_blocks_the_next(
    engine: Callable[..., Trainer], old: Tensors, new: Tensors, mode: StagingMode
) -> None:
    trainer = engine(weight_staging=mode)
    trainer.ok(BeginWeightUpdateReqInput, weight_version="v2", lease_s=0.2)
    assert trainer.bucket(halves(new)[0]).success
    assert trainer.update()["steps_held"] == (mode == "journal")
    update = wait_until(trainer, lambda update: not update["open"])
    assert "lease of 0.2 s ran out" in update["last_failure"]["reason"] and not update["steps_held"]
    late = trainer(EndWeightUpdateReqInput)
    assert late.status_code == 409 and "lease" in late.message
    check_old_serves(trainer, old)
    refresh(trainer, new, "v3")


def test_a_pause_that_nobody_continues_ends(engine: Callable[..., Trainer], old: Tensors, new: Tensors) -> None:
    trainer = engine(pause_timeout=0.3)
    trainer.ok(PauseGenerationReqInput, mode="in_place")
    assert trainer.bucket(halves(new)[0], weight_version="v2").success
    assert trainer.update()["pause_left_s"] <= 0.3 and trainer.update()["implicit"]
    update = wait_until(trainer, lambda update: not update["open"])
    assert "--pause-timeout" in update["last_failure"]["reason"] and update["pause_left_s"] is None
    assert not trainer.harness.scheduler.serving.is_paused
    check_old_serves(trainer, old)


def test_weight_verbs_keep_a_pause_alive(engine: Callable[..., Trainer], old: Tensors, new: Tensors) -> None:
    trainer = engine(pause_timeout=0.4)
    trainer.ok(PauseGenerationReqInput, mode="in_place")
    for part in halves(new):
        time.sleep(0.25)
        assert trainer.bucket(part, weight_version="v2").success
    time.sleep(0.25)
    trainer.ok(ContinueGenerationReqInput)
    assert trainer.digest() == digest_of(new)
    time.sleep(0.45)
    assert trainer.update()["last_failure"] is None


def test_without_a_timeout_a_pause_lasts(engine: Callable[..., Trainer]) -> None:
    trainer = engine()
    trainer.ok(PauseGenerationReqInput, mode="in_place")
    assert trainer.update()["pause_left_s"] is None
    time.sleep(0.1)
    assert trainer.state()["paused"]


# --- staging modes while requests run --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_refresh_while_requests_run(
    engine: Callable[..., Trainer], folders: tuple[Path, Path], new: Tensors, mode: StagingMode
) -> None:
    """Nothing samples from half a refresh; addresses stay; requests wait where the mode writes at once."""
    trainer = engine(weight_staging=mode)
    harness = trainer.harness
    weights = harness.scheduler.runner.state.model.weights
    addresses = [place.storage.data_ptr() for name in weights.metas() for place in weights.places(name)]
    holds = mode in ("journal", "in_place")
    trainer.ok(BeginWeightUpdateReqInput, weight_version="v2")
    for part in halves(new):
        assert trainer.bucket(part).success
        before = harness.scheduler.stats.num_steps
        for _ in range(5):
            harness.tick()
        assert (harness.scheduler.stats.num_steps == before) == holds
        waiting = harness.submit(PROMPT, params={"max_new_tokens": 2})
    assert trainer.ok(EndWeightUpdateReqInput)["weight_version"] == "v2"
    harness.run()
    assert harness.results[waiting].finished.reason.type == "length"  # type: ignore[union-attr]
    spans = harness.results["run0"].versions
    assert [version for version, _, _ in spans] == ["v1", "v2"]
    assert addresses == [place.storage.data_ptr() for name in weights.metas() for place in weights.places(name)]
    assert trainer.digest() == digest_of(new)
    (fresh,) = Harness(folders[1]).generate([PROMPT], {"max_new_tokens": 8})
    (again,) = harness.generate([PROMPT], {"max_new_tokens": 8})
    assert again.token_ids == fresh.token_ids
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_in_place_failures_poison_until_a_complete_refresh(
    engine: Callable[..., Trainer], old: Tensors, new: Tensors
) -> None:
    trainer = engine(weight_staging="in_place")
    harness = trainer.harness
    trainer.ok(BeginWeightUpdateReqInput, weight_version="v2")
    assert trainer.bucket({"ghost": torch.zeros(1)}).status_code == 400
    trainer.ok(AbortWeightUpdateReqInput)
    assert trainer.digest() == digest_of(old) and trainer.state()["poisoned"] is None, "nothing had been written"
    trainer.ok(BeginWeightUpdateReqInput, weight_version="v2")
    assert trainer.bucket(halves(new)[0]).success
    assert trainer(EndWeightUpdateReqInput).status_code == 400
    assert "overwritten in place" in trainer.update()["poisoned"]
    for rid in ("run0", "run1"):
        reason = harness.results[rid].finished.reason  # type: ignore[union-attr]
        assert (reason.type, reason.status_code) == ("abort", 503) and "poisoned" in reason.message
    refused = harness.submit(PROMPT, params={"max_new_tokens": 2})
    harness.run()
    assert harness.results[refused].finished.reason.status_code == 503  # type: ignore[union-attr]
    base = trainer(BeginWeightUpdateReqInput, base_version="v1")
    assert base.status_code == 409 and "poisoned" in base.message
    trainer.ok(BeginWeightUpdateReqInput, weight_version="v3", coverage="partial", update_id="u3")
    assert trainer.bucket(halves(new)[0], update_id="u3").success
    trainer.ok(EndWeightUpdateReqInput, update_id="u3")
    assert trainer.update()["poisoned"], "a part of the tensors cannot heal it"
    refresh(trainer, new, "v4")
    assert trainer.update()["poisoned"] is None
    (served,) = harness.generate([PROMPT], {"max_new_tokens": 2})
    assert served.versions == [("v4", 0, 2)]


# --- clients without begin and end, and miles ------------------------------------------------------------------------


def slime(trainer: Trainer, tensors: Tensors, label: str) -> ControlReqOutput:
    trainer.ok(PauseGenerationReqInput)
    trainer.ok(FlushCacheReqInput)
    for part in halves(tensors):
        trainer.bucket(part, weight_version=label)
    return trainer(ContinueGenerationReqInput)


def torchrl(trainer: Trainer, tensors: Tensors, label: str) -> ControlReqOutput:
    trainer.ok(PauseGenerationReqInput, mode="retract")
    assert trainer.state()["num_running_reqs"] == 0
    trainer.bucket(tensors, weight_version=label, abort_all_requests=False)
    return trainer(ContinueGenerationReqInput)


def areal(trainer: Trainer, tensors: Tensors, label: str) -> ControlReqOutput:
    trainer.ok(PauseGenerationReqInput)
    for part in halves(tensors):
        trainer.bucket(part, abort_all_requests=True)
    trainer.ok(UpdateWeightVersionReqInput, new_version=label)
    return trainer(ContinueGenerationReqInput)


def miles(trainer: Trainer, tensors: Tensors, label: str) -> ControlReqOutput:
    trainer.ok(PauseGenerationReqInput, mode="in_place")
    trainer.ok(BeginWeightUpdateReqInput)
    for part in halves(tensors):
        trainer.bucket(part)
    trainer.ok(UpdateWeightVersionReqInput, new_version=label, abort_all_requests=False)
    ended = trainer(EndWeightUpdateReqInput)
    return ended if not ended.success else trainer(ContinueGenerationReqInput)


CLIENTS = [slime, torchrl, areal, miles]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("mode", ["host", "journal"])
def test_a_client_s_refresh(
    engine: Callable[..., Trainer], new: Tensors, client: Callable[..., ControlReqOutput], mode: StagingMode
) -> None:
    trainer = engine(weight_staging=mode)
    assert client(trainer, new, "v2").success
    assert trainer.digest() == digest_of(new)
    assert trainer.state()["weight_version"] == "v2" and not trainer.state()["paused"]
    trainer.harness.run()


@pytest.mark.parametrize("client", [slime, torchrl, areal])
def test_a_client_that_died_before_continue_does_not_spoil_the_next(
    engine: Callable[..., Trainer], old: Tensors, new: Tensors, client: Callable[..., ControlReqOutput]
) -> None:
    """The first one left half an update and a pause; the second starts with a pause of its own."""
    trainer = engine()
    trainer.ok(PauseGenerationReqInput, mode="in_place")
    lost = trainer.bucket(halves(old)[0], weight_version="v9").data["weight_update"]["update_id"]
    assert client(trainer, new, "v2").success
    assert trainer.digest() == digest_of(new) and trainer.state()["weight_version"] == "v2"
    ended = trainer.ok(GetWeightUpdateReqInput, update_id=lost)
    assert ended["outcome"] == "lost" and "new pause" in ended["reason"]
    assert trainer.update()["last_failure"] is None, "nothing has failed since the last success"


def test_a_pause_in_the_middle_is_not_an_update_lost_in_silence(
    engine: Callable[..., Trainer], old: Tensors, new: Tensors
) -> None:
    """Another client pauses between two buckets: continue refuses, rather than succeed without the first."""
    trainer = engine()
    first, second = halves(new)
    trainer.ok(PauseGenerationReqInput, mode="in_place")
    assert trainer.bucket(first, weight_version="v2").success
    trainer.ok(PauseGenerationReqInput, mode="in_place")
    assert trainer.bucket(second, weight_version="v2").success
    answer = trainer(ContinueGenerationReqInput)
    assert answer.status_code == 400 and "missing" in answer.message
    trainer.ok(ContinueGenerationReqInput)
    check_old_serves(trainer, old)


def test_verl_s_calls_while_running_are_updates_of_their_own(
    engine: Callable[..., Trainer], old: Tensors, new: Tensors
) -> None:
    trainer = engine()
    first, second = halves(new)
    assert trainer.bucket(first).data["weight_version"] == "v1+1"
    assert trainer.digest() == digest_of(old | first)
    assert trainer.bucket(second).data["weight_version"] == "v1+2"
    assert trainer.digest() == digest_of(new)
    trainer.harness.run()


def test_the_time_of_an_update_is_recorded_in_parts_n23a(engine: Callable[..., Trainer], new: Tensors) -> None:
    """N23a: the parts are the time before begin, which the sender states, staging, receiving in it, and the stall."""
    trainer = engine()
    start = time.perf_counter()
    trainer.ok(BeginWeightUpdateReqInput, weight_version="v", prepared_s=2.5)
    trainer.buckets(new)
    answer = trainer.ok(EndWeightUpdateReqInput)
    whole = time.perf_counter() - start
    assert answer["prepared_seconds"] == 2.5
    assert 0 < answer["receiving_seconds"] < answer["staging_seconds"] < whole
    ended = trainer.state()["ended_updates"][-1]
    assert ended["prepared_s"] == 2.5 and ended["receiving_s"] == answer["receiving_seconds"]
    trainer.ok(BeginWeightUpdateReqInput, weight_version="w")
    trainer.buckets(new)
    again = trainer.ok(EndWeightUpdateReqInput)
    assert again["prepared_seconds"] is None and 0 < again["receiving_seconds"] < again["staging_seconds"]

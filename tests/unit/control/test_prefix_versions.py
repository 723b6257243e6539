"""KV and labels of a refresh: no prefix of older weights is matched, and no label is given before it is in force.

The numbers are of public bugs (B3); 64, 66 and 67 are 63 seen from other recipes, so that the tests of 63 and 65 are
theirs too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import ContinueGenerationReqInput, GetStateReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from tests.faults.wrong_engines import WRONG_ENGINES
from tests.late_loop import loop  # noqa: F401
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness, Result

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
# Two float64 engines that batch differently differ by summation order only.
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    return (
        tiny_checkpoint(base / "old", "moe", seed=1, dtype="float64"),
        tiny_checkpoint(base / "new", "moe", seed=2, dtype="float64"),
    )


@pytest.fixture
def trainer(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> LoopbackTrainer:
    trainer = LoopbackTrainer(logical_tensors(folders[1]))
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    return trainer


def engine(folder: Path, **settings) -> Harness:
    return Harness(folder, dtype="float64", weight_version="v1", **settings)


def is_of(folder: Path, result: Result) -> bool:
    """Return whether a fresh engine on the weights in `folder` gives the same record."""
    (want,) = engine(folder).generate([result.prompt_ids], {"max_new_tokens": len(result.token_ids)})
    return (
        result.token_ids == want.token_ids
        and np.allclose(result.logprobs, want.logprobs, rtol=0, atol=TOLERANCE)
        and np.array_equal(result.routes, want.routes)
    )


def kv_versions(result: Result) -> set[str]:
    """Return the labels of all versions whose KV the result reports as used."""
    assert result.finished is not None
    prefill = {span.version for span in result.finished.prefill_weight_versions}
    return prefill | {str(result.finished.kv_weight_version_oldest)}


def refresh_in_place(harness: Harness, trainer: LoopbackTrainer) -> None:
    """Refresh as asynchronous recipes do: requests keep their KV through the refresh."""
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    assert trainer.refresh(harness, "v2").success
    assert harness.control(ContinueGenerationReqInput).success


def run_over_a_refresh(folder: Path, trainer: LoopbackTrainer) -> tuple[Result, Result, Result]:
    """Run a request across an in-place refresh, and its prompt twice more after the refresh."""
    harness = engine(folder)
    harness.generate([PROMPT], {"max_new_tokens": 4})  # the prefix is cached under v1
    running = harness.submit(PROMPT, params={"max_new_tokens": 40})
    for _ in range(6):
        harness.tick()
    refresh_in_place(harness, trainer)
    (again,) = harness.generate([PROMPT], {"max_new_tokens": 8})
    (hit,) = harness.generate([PROMPT], {"max_new_tokens": 8})
    return harness.results[running], again, hit


def test_63_miles_2783_prefix_kv_of_old_weights_is_never_matched(
    folders: tuple[Path, Path], trainer: LoopbackTrainer
) -> None:
    """Neither the KV of a request that ended before the refresh matches, nor of one that ran across it."""
    running, again, hit = run_over_a_refresh(folders[0], trainer)
    assert [version for version, _, _ in running.versions] == ["v1", "v2"]
    assert "v1" in kv_versions(running), "a request that kept old KV says so"
    assert again.finished is not None and again.finished.cached_tokens == 0
    assert is_of(folders[1], again) and kv_versions(again) == {"v2"}
    assert hit.finished is not None and hit.finished.cached_tokens == len(PROMPT) - 1
    assert is_of(folders[1], hit) and kv_versions(hit) == {"v2"}


@pytest.mark.mutant
def test_63_a_cache_without_versions_is_caught(folders: tuple[Path, Path], trainer: LoopbackTrainer) -> None:
    with WRONG_ENGINES["shares_kv_across_versions"].wrong():
        _, again, _ = run_over_a_refresh(folders[0], trainer)
    assert again.finished is not None and again.finished.cached_tokens > 0
    assert not is_of(folders[1], again)
    assert "v1" in kv_versions(again), "even then the record says whose KV it is"


def test_65_nemo_rl_4018_seventeen_refreshes_leave_no_old_kv(
    folders: tuple[Path, Path], trainer: LoopbackTrainer
) -> None:
    """There is no flush; requests run across every refresh, and all of them share one long prefix."""
    harness = engine(folders[0])
    both = [logical_tensors(folder) for folder in folders]
    for number in range(2, 19):
        harness.submit(PROMPT * 3, params={"max_new_tokens": 30})
        for _ in range(3):
            harness.tick()
        trainer.tensors = both[number % 2 == 0]
        assert trainer.refresh(harness, f"v{number}", buckets=1).success
        (fresh,) = harness.generate([PROMPT * 3], {"max_new_tokens": 3})
        assert kv_versions(fresh) == {f"v{number}"} and fresh.versions == [(f"v{number}", 0, 3)]
    assert is_of(folders[1], fresh)
    harness.check_idle()


@pytest.mark.parametrize("between", ["nothing", "retract", "abort", "aborted refresh", "refused refresh"])
def test_68_unirl_94_kv_of_the_same_weights_is_used_again(
    folders: tuple[Path, Path], trainer: LoopbackTrainer, between: str
) -> None:
    """Nothing but new weights makes a prefix unusable."""
    harness = engine(folders[0])
    harness.generate([PROMPT], {"max_new_tokens": 4})
    if between in ("retract", "abort"):
        harness.control(PauseGenerationReqInput, mode=between)
        harness.control(ContinueGenerationReqInput)
    elif between.endswith("refresh"):
        assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
        assert trainer.send(harness, sorted(trainer.tensors)[:5]).success
        verb = AbortWeightUpdateReqInput if between == "aborted refresh" else EndWeightUpdateReqInput
        assert harness.control(verb).success == (between == "aborted refresh")
    (again,) = harness.generate([PROMPT], {"max_new_tokens": 4})
    assert again.finished is not None and again.finished.cached_tokens >= len(PROMPT) - 1
    assert is_of(folders[0], again) and kv_versions(again) == {"v1"}


def test_69_vllm_49040_no_token_has_the_new_label_before_the_refresh_is_done(
    folders: tuple[Path, Path], trainer: LoopbackTrainer
) -> None:
    """Requests that end between the buckets, and one that waits all through the refresh."""
    harness = engine(folders[0], max_running_requests=1)
    names = sorted(trainer.tensors)
    running = harness.submit(PROMPT, params={"max_new_tokens": 450})
    waiting = harness.submit(PROMPT[::-1], params={"max_new_tokens": 5})
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
    for first in range(3):
        assert trainer.send(harness, names[first::3], weight_version="v2").success
        assert harness.control(GetStateReqInput).data["weight_version"] == "v1"
    assert not harness.results[waiting].token_ids and harness.results[running].finished is None
    sampled = len(harness.results[running].token_ids)
    assert harness.control(EndWeightUpdateReqInput).data["weight_version"] == "v2"
    assert harness.control(GetStateReqInput).data["weight_version"] == "v2"
    harness.run()
    (_, start, cut), (label, _, end) = harness.results[running].versions
    assert start == 0 and cut >= sampled and label == "v2" and end == 450
    old = is_of(folders[0], _first(harness.results[running], cut))
    assert old, "every token before the end is the old weights'"
    assert harness.results[waiting].versions == [("v2", 0, 5)] and is_of(folders[1], harness.results[waiting])


@pytest.mark.mutant
def test_69_a_version_published_with_the_first_bucket_is_caught(
    folders: tuple[Path, Path], trainer: LoopbackTrainer
) -> None:
    with WRONG_ENGINES["first_bucket_bumps_the_version"].wrong():
        harness = engine(folders[0])
        running = harness.submit(PROMPT, params={"max_new_tokens": 60})
        for _ in range(4):
            harness.tick()
        assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
        assert trainer.send(harness, sorted(trainer.tensors)[::3], weight_version="v2").success
        harness.run()
    (_, _, cut), (label, _, _) = harness.results[running].versions
    assert label == "v2" and not is_of(folders[1], _last(harness.results[running], cut))


def _first(result: Result, count: int) -> Result:
    """Return the record of the first `count` tokens."""
    rows = len(result.prompt_ids) + count - 1
    return _Part(result, result.prompt_ids, slice(0, count), slice(0, rows))


def _last(result: Result, start: int) -> Result:
    """Return the record from token `start` on, as of a request whose prompt is everything before."""
    prompt = result.prompt_ids + result.token_ids[:start]
    return _Part(result, prompt, slice(start, None), slice(0, None))


class _Part(Result):
    """Some tokens of a result, with the rows of routes that belong to them."""

    def __init__(self, whole: Result, prompt_ids: list[int], tokens: slice, rows: slice) -> None:
        super().__init__(whole.rid, prompt_ids, whole.token_ids[tokens], whole.logprobs[tokens])
        self._routes = whole.routes[rows]

    @property
    def routes(self) -> np.ndarray:
        return self._routes

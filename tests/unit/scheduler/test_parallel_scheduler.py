"""An engine of several ranks against one rank: tokens, log-probabilities, routes; verbs that all ranks act on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb.load_dump import LoadDump
from rollout.core.messages.experts import DumpExpertDistributionReqInput, StartExpertDistributionReqInput
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GetStateReqInput,
    PauseGenerationReqInput,
    ShutdownReqInput,
)
from tests.late_loop import loop  # noqa: F401
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness, Result

PROMPTS = [[7, 3, 9], list(range(20, 60)), [5], [4] * 17, list(range(100, 107)), [250, 2, 2, 9]]
GREEDY = {"max_new_tokens": 9}
SAMPLED = {"max_new_tokens": 9, "temperature": 1.0, "sampling_seed": 11}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2 ep2": {"tp_size": 2, "ep_size": 2},
    "dp2 of tp2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
    "dp2 of tp2, experts split": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "dp2 all-to-all": {
        "tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2, "moe_a2a_backend": "all_to_all",
    },
    "tp4 ep2": {"tp_size": 4, "ep_size": 2},
    "dp2 of tp4 all-to-all": {
        "tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4, "moe_a2a_backend": "all_to_all",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Result]]:
    harness = Harness(folder, dtype="float64", num_threads=1)
    return {name: harness.generate(PROMPTS, params) for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))}


def compare(got: list[Result], want: list[Result]) -> None:
    """Compare tokens and routes exactly, and log-probabilities up to rounding.

    Steps of other sizes round the last bits of a float64 product in another way.
    """
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert np.array_equal(ours.routes, theirs.routes)
        assert np.allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_results_of_one_rank(name: str, folder: Path, expected: dict) -> None:
    with ParallelHarness(folder, **LAYOUTS[name]) as harness:
        compare(harness.generate(PROMPTS, GREEDY), expected["greedy"])
        compare(harness.generate(PROMPTS, SAMPLED), expected["sampled"])
        (alone,) = harness.generate(PROMPTS[1:2], GREEDY)
        compare([alone], expected["greedy"][1:2])
        harness.check_idle()


@pytest.fixture
def dp(folder: Path) -> Iterator[ParallelHarness]:
    with ParallelHarness(folder, **LAYOUTS["dp2 of tp2"]) as harness:
        yield harness


def test_a_rank_without_requests_takes_part(dp: ParallelHarness, expected: dict) -> None:
    got = [dp.generate([prompt], GREEDY, dp_rank=1)[0] for prompt in PROMPTS[:3]]
    compare(got, expected["greedy"][:3])
    assert [len(s.queues.all()) for s in dp.schedulers] == [0, 0]


def test_verbs_act_on_all_ranks_and_counts_add_up(dp: ParallelHarness) -> None:
    rids = [dp.submit(PROMPTS[1], params={"max_new_tokens": 40}, dp_rank=rank) for rank in (0, 1, 1)]
    for _ in range(4):
        dp.tick()
    answer = dp.control(PauseGenerationReqInput, mode="retract")
    assert answer.success and (answer.data["num_running"], answer.data["num_waiting"]) == (0, 3)
    assert [part["num_waiting"] for part in answer.data["dp_ranks"]] == [1, 2]
    state = dp.control(GetStateReqInput).data
    assert state["paused"] and state["num_waiting_reqs"] == 3
    assert all(scheduler.serving.is_paused for scheduler in dp.schedulers)
    assert dp.control(ContinueGenerationReqInput).success
    dp.run()
    assert all(dp.results[rid].finished.reason.type == "length" for rid in rids)  # type: ignore[union-attr]


def test_a_pause_waits_for_the_requests_of_all_ranks(dp: ParallelHarness) -> None:
    for rank, length in enumerate((4, 15)):
        dp.submit([7, 3, 9], rid=f"w{rank}", params={"max_new_tokens": length}, dp_rank=rank)
    for _ in range(2):
        dp.tick()
    verb = dp.post(PauseGenerationReqInput, mode="wait")
    dp.submit([5, 5], rid="late", params={"max_new_tokens": 2}, dp_rank=0)
    answer = dp.wait(verb)
    assert answer.success and (answer.data["num_running"], answer.data["num_waiting"]) == (0, 1)
    assert [len(dp.results[f"w{rank}"].token_ids) for rank in range(2)] == [4, 15]
    assert dp.control(ContinueGenerationReqInput).success
    dp.run()
    assert len(dp.results["late"].token_ids) == 2
    dp.check_idle()


@pytest.mark.full
def test_a_flush_that_one_rank_must_refuse_is_refused_by_all(dp: ParallelHarness, folder: Path) -> None:
    dp.generate([PROMPTS[1]] * 2, GREEDY)
    cached = [scheduler.cache.prefix_cache.num_cached for scheduler in dp.schedulers]
    assert all(cached)
    dp.submit(PROMPTS[0], params={"max_new_tokens": 400}, dp_rank=1)
    dp.tick()
    refused = dp.control(FlushCacheReqInput)
    assert not refused.success and "1 requests running" in refused.message
    assert all(scheduler.cache.prefix_cache.num_cached for scheduler in dp.schedulers)
    dp.run()
    assert dp.control(FlushCacheReqInput).success
    assert not any(scheduler.cache.prefix_cache.num_cached for scheduler in dp.schedulers)


def test_all_ranks_stop_in_the_same_turn(dp: ParallelHarness) -> None:
    dp.submit(PROMPTS[0], params={"max_new_tokens": 12}, dp_rank=1)
    request_id = dp.post(ShutdownReqInput, drain_s=30.0)
    while not any(scheduler.serving.is_stopped for scheduler in dp.schedulers):
        dp.tick()
    assert all(scheduler.serving.is_stopped for scheduler in dp.schedulers)
    assert dp.answers[request_id].message == "stopped"
    assert all(result.finished.reason.type == "length" for result in dp.results.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["tp2 ep2", "dp2 of tp2", "dp2 of tp4 all-to-all"])
@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_loads_of_all_ranks_are_recorded_once(name: str, mode: str, folder: Path, expected: dict) -> None:
    with ParallelHarness(folder, **LAYOUTS[name]) as harness:
        assert harness.control(StartExpertDistributionReqInput, mode=mode).success
        harness.generate(PROMPTS, GREEDY)
        answer = harness.control(DumpExpertDistributionReqInput)
        assert answer.success, answer.message
    counts = LoadDump.from_message(answer.data["dump"]).tensors["logical_count"]
    routes = np.concatenate([result.routes for result in expected["greedy"]])
    want = [np.bincount(routes[:, layer].ravel(), minlength=8) for layer in range(routes.shape[1])]
    assert np.array_equal(counts, np.stack(want))


@pytest.mark.full(but="sequential-settings0-True")
@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        ({"tp_size": 2}, True),
        ({"tp_size": 2, "ep_size": 2}, True),
        ({"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2}, False),
        (LAYOUTS["dp2 all-to-all"] | {"ep_num_redundant_experts": 2}, True),
    ],
)
def test_where_bits_depend_on_the_batch_it_is_reported(folder: Path, settings: dict[str, Any], holds: bool) -> None:
    """A token has the same bits alone and among others, or the engine reports why not: compiled float32 operators."""
    with ParallelHarness(folder, dtype="float32", **settings) as harness:
        state = harness.control(GetStateReqInput).data
        assert state["batch_invariant"] is holds and bool(state["batch_invariance_note"]) is not holds
        if holds:
            together = harness.generate(PROMPTS, GREEDY)
            assert harness.control(FlushCacheReqInput).success
            alone = [harness.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
            assert [result.logprobs for result in alone] == [result.logprobs for result in together]

"""Drafts on several ranks give the results of plain decoding, and the same counted loads of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb.load_dump import LoadDump
from rollout.core.messages.experts import (
    DumpExpertDistributionReqInput,
    StartExpertDistributionReqInput,
    StopExpertDistributionReqInput,
)
from rollout.scheduler.drafting import Drafting
from tests.drafters import KnownDrafter
from tests.late_loop import overlap
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness, Result

PROMPTS = [[7, 3, 9], list(range(20, 60)), [5], [4] * 17, list(range(100, 107)), [250, 2, 2, 9]]
PARAMS = {"max_new_tokens": 15, "temperature": 1.0, "sampling_seed": 11}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2 ep2": {"tp_size": 2, "ep_size": 2},
    "dp2 of tp2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
    "dp2 of tp4 all-to-all": {
        "tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4, "moe_a2a_backend": "all_to_all",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[Result], np.ndarray]:
    harness = Harness(folder, dtype="float64", num_threads=1)
    return recorded(harness)


def recorded(harness: Any) -> tuple[list[Result], np.ndarray]:
    """Return the results, and how often each layer chose each expert for them: [L, E]."""
    assert harness.control(StartExpertDistributionReqInput, mode="stat").success
    results = harness.generate(PROMPTS, PARAMS)
    assert harness.control(StopExpertDistributionReqInput).success
    answer = harness.control(DumpExpertDistributionReqInput)
    return results, LoadDump.from_message(answer.data["dump"]).tensors["logical_count"]


@pytest.mark.parametrize("kind", ["mixed", "right", "wrong"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafted_ranks_give_and_count_what_plain_ones_do(name: str, kind: str, folder: Path, plain: Any) -> None:
    want, counts_LE = plain
    outputs = {tuple(result.prompt_ids): result.token_ids for result in want}
    with ParallelHarness(folder, speculative_algorithm="NGRAM", **LAYOUTS[name]) as harness:
        for scheduler in harness.schedulers:
            scheduler._steps._drafting = Drafting(KnownDrafter(outputs, 320, kind), None, 320, 4)
        got, drafted_LE = recorded(harness)
        tallies = [scheduler._steps._drafting.counts for scheduler in harness.schedulers]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert np.array_equal(ours.routes, theirs.routes)
        assert np.allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-10)
    assert np.array_equal(drafted_LE, counts_LE)
    assert sum(tally.num_drafted for tally in tallies) > 0


@pytest.mark.parametrize("name", ["one rank", "tp2 ep2", "dp2 of tp2"])
def test_ranks_with_a_draft_model_give_and_count_what_plain_ones_do(
    name: str, folder: Path, plain: Any, tmp_path: Path
) -> None:
    """The first draft is another model, the second one is the served model: it is right."""
    want, counts_LE = plain
    for draft in (tiny_checkpoint(tmp_path / "other", seed=9), folder):
        settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
        with ParallelHarness(folder, **settings, **LAYOUTS[name]) as harness:
            for scheduler in harness.schedulers:
                scheduler._steps._drafting._choice = None
            got, drafted_LE = recorded(harness)
            tallies = [scheduler._steps._drafting.counts for scheduler in harness.schedulers]
        for ours, theirs in zip(got, want, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert np.array_equal(ours.routes, theirs.routes)
            assert np.allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-10)
        assert np.array_equal(drafted_LE, counts_LE)
        for tally in tallies:
            assert tally.num_drafted > 25 and (draft != folder or tally.num_kept > 0.98 * tally.num_drafted)


def test_ranks_whose_drafts_differ_verify_the_tokens_of_the_first(folder: Path, plain: Any, tmp_path: Path) -> None:
    """A refresh of the draft that failed in the middle may leave other weights on each rank."""
    want, _ = plain
    small = tiny_checkpoint(tmp_path / "tied", "moe", seed=5)
    settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(small)}
    with ParallelHarness(folder, **settings, **LAYOUTS["tp2 ep2"]) as harness:
        for scheduler in harness.schedulers:
            scheduler._steps._drafting._choice = None
        harness.schedulers[1]._steps._drafting.runner.model.model.model.norm.weight.normal_()
        got = harness.generate(PROMPTS, PARAMS)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert np.allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-10)


def test_a_recorder_that_stops_has_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is finished before the next message, also where steps may overlap."""
    overlap(monkeypatch)
    harness = Harness(folder, speculative_algorithm="NGRAM")
    harness.submit(PROMPTS[0], params=PARAMS)
    assert harness.control(StartExpertDistributionReqInput, mode="stat").success
    for _ in range(3):
        assert harness.tick()
    answer = harness.control(StopExpertDistributionReqInput)
    assert answer.data["num_passes"] == 4

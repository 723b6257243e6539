"""A layer that drafts on several ranks: the answers of plain decoding, and the proposals of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.invariance import Ask
from tests.kernels import native_ops
from tests.mtp_zoo import mtp_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness, Result
from tests.unit.engine.test_invariance_mtp import tell

PROMPTS = [[7, 3, 9], list(range(20, 60)), [5], [250, 2, 2, 9]]
PARAMS = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 11}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 ep2": {"tp_size": 2, "ep_size": 2},
    "tp2 all-to-all": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
}
DP = {"dp_size": 2, "enable_dp_attention": True}
GROUPS: dict[str, dict[str, Any]] = {
    "dp2": {"tp_size": 2, "ep_size": 2} | DP,
    "dp2 of tp2": {"tp_size": 4, "ep_size": 2} | DP,
    "dp2 of tp2, all-to-all": {"tp_size": 4, "ep_size": 4, "moe_a2a_backend": "all_to_all"} | DP,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_checkpoint(tmp_path_factory.mktemp("model") / "m", "glm4_moe", 3)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Result]:
    return Harness(folder, dtype="float64", num_threads=1).generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def proposed_alone(folder: Path) -> list[Any]:
    harness = Harness(folder, dtype="float64", num_threads=1, speculative_algorithm="NEXTN")
    return proposals([harness.scheduler], harness)[1][0]


def proposals(schedulers: Any, harness: Any, **fields: Any) -> tuple[list[Result], list[list[Any]]]:
    """Return the results, and all that the layer proposed on each rank."""
    found: list[list[Any]] = [[] for _ in schedulers]
    for own, scheduler in zip(found, schedulers, strict=True):
        drafting = scheduler._steps._drafting
        drafting._choice = None
        drafting.runner.propose = noted(drafting.runner.propose, own)
    return harness.generate(PROMPTS, PARAMS, **fields), found


def noted(propose: Any, found: list[Any]) -> Any:
    def call(*args: Any) -> Any:
        made = propose(*args)
        if made:  # else this group had no rows
            found.append(made)
        return made

    return call


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_propose_what_one_does(name: str, folder: Path, plain: list[Result], proposed_alone: list[Any]) -> None:
    with ParallelHarness(folder, speculative_algorithm="NEXTN", **LAYOUTS[name]) as harness:
        got, found = proposals(harness.schedulers, harness)
    check_same(got, plain)
    assert sum(len(ids) for call in proposed_alone for ids in call) > 30
    assert found == [proposed_alone] * 2


@pytest.mark.full(but="dp2")
@pytest.mark.parametrize("name", GROUPS)
def test_a_group_proposes_what_one_rank_does_while_the_other_has_no_requests(
    name: str, folder: Path, plain: list[Result], proposed_alone: list[Any]
) -> None:
    with ParallelHarness(folder, speculative_algorithm="NEXTN", **GROUPS[name]) as harness:
        got, found = proposals(harness.schedulers, harness, dp_rank=0)
    check_same(got, plain)
    ranks = len(found) // 2
    assert found == [proposed_alone] * ranks + [[]] * ranks


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "qwen3_5"])
def test_layers_of_families_draft_for_two_groups_bit_for_bit(family: str, dtype: str, tmp_path: Path) -> None:
    """The layer of the last one has no experts, so its groups need not meet."""
    native_ops()
    folder, has_experts = mtp_checkpoint(tmp_path / "m", family, 3), family != "qwen3_5"
    settings = {"tp_size": 2, "ep_size": 1 + has_experts, "enable_return_routed_experts": has_experts} | DP
    with ParallelHarness(folder, dtype=dtype, **settings) as harness:
        want = harness.generate(PROMPTS, PARAMS)
    with ParallelHarness(folder, dtype=dtype, speculative_algorithm="NEXTN", **settings) as harness:
        draftings = [scheduler._steps._drafting for scheduler in harness.schedulers]
        for drafting in draftings:
            drafting._choice = None
            tell(drafting, [Ask(tuple(prompt)) for prompt in PROMPTS], want)
        got = harness.generate(PROMPTS, PARAMS)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs
        assert not has_experts or np.array_equal(ours.routes, theirs.routes)
    for drafting in draftings:
        assert drafting.runner.meets_groups == has_experts and drafting.counts.num_kept > 5


def check_same(got: list[Result], plain: list[Result]) -> None:
    for ours, theirs in zip(got, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert np.array_equal(ours.routes, theirs.routes)
        assert np.allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-10)

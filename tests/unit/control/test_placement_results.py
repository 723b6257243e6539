"""A placement of experts changes no result, on one rank or on several, and a balancer that stops reports it.

Each test plays the wrong variant of a public engine, by its number in the bug list B4.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.algorithms.registry import make_plan
from eplb.algorithms.types import ExpertLayout, count_duplicates
from eplb.errors import MapError
from eplb.load_history import LoadHistory
from eplb.placement import ExpertPlacement
from rollout.control import eplb_control
from rollout.control.eplb_control import EplbControl
from rollout.core.messages.experts import EplbRebalanceReqInput
from rollout.core.messages.io_struct import FlushCacheReqInput, GetStateReqInput
from rollout.distributed.communicator import RankLostError
from rollout.model.weight_loading import WeightIndex
from tests import parallel_harness
from tests.late_loop import loop  # noqa: F401
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.routes_judge import EXPERTS, LAYERS, LAYOUTS, OneRank, decisive_checkpoint, moved_experts, prompt
from tests.scheduler_harness import Harness, Result

PROMPTS = [prompt(70, 11), prompt(71, 2), prompt(72, 30), prompt(73, 5)]
NUM_NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decisive_checkpoint(tmp_path_factory.mktemp("b4") / "model", 41)


@pytest.fixture(scope="module")
def judge(folder: Path) -> OneRank:
    judge = OneRank(folder)
    for ids in PROMPTS:
        judge.says(ids, NUM_NEW)
    return judge


def answers(harness: ParallelHarness) -> list[Result]:
    assert harness.control(FlushCacheReqInput).success
    return harness.generate(PROMPTS, {"max_new_tokens": NUM_NEW})


def objections(harness: ParallelHarness, judge: OneRank) -> list[str]:
    return [word for result in answers(harness) for word in judge.objections(result, NUM_NEW)]


# --- 70, 71: one map and one choice for all who share tokens ----------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp2", "dp2 of tp4"])
def test_70_sglang_32962_ranks_agree_on_the_replica(
    folder: Path, judge: OneRank, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--moe-a2a-backend none`, where every rank computes its experts' part of every token."""
    with ParallelHarness(folder, **LAYOUTS[layout], **moved_experts(5, LAYOUTS[layout]["ep_size"])) as harness:
        assert objections(harness, judge) == []
        pick = ExpertPlacement.logical_to_physical

        def by_rank(self: ExpertPlacement, layer: int, ids_TK: torch.Tensor, first_row: int = 0) -> torch.Tensor:
            return pick(self, layer, ids_TK, first_row + self.ep_rank)

        monkeypatch.setattr(ExpertPlacement, "logical_to_physical", by_rank)
        assert objections(harness, judge)


def other_map(seed: int, ranks: int) -> list[list[int]]:
    """Return a random map [L, P] with four redundant experts."""
    return json.loads(moved_experts(seed, ranks)["init_expert_location"])["physical_to_logical_map"]


def placements(harness: ParallelHarness) -> list[ExpertPlacement]:
    return [scheduler.runner.state.placement for scheduler in harness.schedulers]


@pytest.mark.full(but="sequential-tp2")
@pytest.mark.parametrize("layout", ["tp2", "dp2 of tp4 all-to-all"])
def test_71_sglang_18213_results_do_not_change_when_experts_move(
    folder: Path, judge: OneRank, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = LAYOUTS[layout]["ep_size"]
    with ParallelHarness(folder, **LAYOUTS[layout], ep_num_redundant_experts=4) as harness:
        for seed in (1, 2):
            moved = harness.control(EplbRebalanceReqInput, physical_to_logical_map=other_map(seed, ranks))
            assert moved.success, moved.message
            assert objections(harness, judge) == []
        before = {place: place.split() for place in placements(harness)}
        assert harness.control(EplbRebalanceReqInput, physical_to_logical_map=other_map(3, ranks)).success
        assert objections(harness, judge) == []

        def stale(self: ExpertPlacement, layer: int, ids_TK: torch.Tensor, first_row: int = 0) -> torch.Tensor:
            table = before[self]
            return table.slots(layer, table.widths()[layer], ids_TK, first_row)

        monkeypatch.setattr(ExpertPlacement, "logical_to_physical", stale)
        assert objections(harness, judge)


# --- 72: a balancer that stops ----------------------------------------------------------------------------------------


@pytest.fixture
def balanced(folder: Path) -> Iterator[ParallelHarness]:
    settings = LAYOUTS["tp2"] | {"ep_num_redundant_experts": 4, "enable_eplb": True}
    with ParallelHarness(folder, **settings, eplb_rebalance_num_iterations=10) as harness:
        yield harness


def status(harness: ParallelHarness) -> dict[str, Any]:
    return harness.control(GetStateReqInput).data["eplb"]


def controls(harness: ParallelHarness) -> list[EplbControl]:
    owners = [getattr(hook, "__self__", None) for s in harness.schedulers for hook in s.agenda.order]
    return [owner for owner in owners if isinstance(owner, EplbControl)]


def test_72_vllm_57883_a_balancer_that_hangs_says_so(
    balanced: ParallelHarness, judge: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports this within the deadline of a stage, while requests are served."""
    release, decide = threading.Event(), eplb_control.decide

    def never(*args: Any, **fields: Any) -> Any:
        assert release.wait(60)
        return decide(*args, **fields)

    monkeypatch.setattr(eplb_control, "decide", never)
    for control in controls(balanced):
        control._manager.policy = replace(control._manager.policy, deadline_s=0.3)
    assert objections(balanced, judge) == []
    assert objections(balanced, judge) == []
    assert status(balanced)["stage"] == "planning"
    time.sleep(0.4)
    assert status(balanced)["stuck"].startswith("a rebalance is stuck: planning for")
    release.set()
    while status(balanced)["stage"] != "idle":
        balanced.tick()
    assert status(balanced)["stuck"] is None and status(balanced)["num_evaluations"] == 1


def test_72_vllm_57883_a_counter_that_runs_backwards_is_seen(
    balanced: ParallelHarness, judge: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the wrong variant the number of steps since the last look is negative, so that no look is ever due."""
    for _ in range(3):
        assert objections(balanced, judge) == []
    assert status(balanced)["num_evaluations"] >= 1
    monkeypatch.setattr(LoadHistory, "num_passes", property(lambda self: -1000))
    before = status(balanced)
    for _ in range(3):
        assert objections(balanced, judge) == []
    after = status(balanced)
    assert after["num_evaluations"] == before["num_evaluations"]
    assert after["last_evaluation_age_s"] > before["last_evaluation_age_s"]


# --- 73: waits --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_73_vllm_32860_no_rank_waits_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank does not come: the other raises at the deadline.  The wrong engine waits without a deadline."""
    for deadline_s, ends in ((1.0, True), (60.0, False)):
        monkeypatch.setattr(parallel_harness, "COLLECTIVE_S", deadline_s)
        with ParallelHarness(folder, **LAYOUTS["tp2"]) as harness:
            alone = harness._threads[0].submit(lambda harness=harness: harness.schedulers[0].tick(0))  # type: ignore[misc]
            time.sleep(3)
            assert alone.done() is ends
            if ends:
                assert isinstance(alone.exception(), RankLostError) and "a rank is lost" in str(alone.exception())
            else:
                harness.schedulers[1].tick(0)
                alone.result(10)


# --- 74: two slots of an expert on one rank ---------------------------------------------------------------------------


def test_74_deepseek_eplb_22_no_rank_has_an_expert_twice(folder: Path, judge: OneRank) -> None:
    """The published algorithm plans such maps; ours do not, and one that is given is refused."""
    layout = ExpertLayout(num_logical_experts=EXPERTS, num_physical_experts=EXPERTS + 4, num_ranks=2)
    hot = np.array([[100.0, 1, 1, 1, 1, 1, 1, 1], [1.0, 1, 60, 1, 50, 1, 1, 1]])
    theirs = make_plan("deepseek", hot, layout)
    assert count_duplicates(theirs.physical_to_logical_LP, layout) > 0
    for name in ("balanced", "min_move", "auto"):
        current = make_plan("balanced", np.ones_like(hot), layout).physical_to_logical_LP
        plan = make_plan(name, hot, layout, current)
        assert count_duplicates(plan.physical_to_logical_LP, layout) == 0, name
    with pytest.raises(MapError, match="twice"):
        ExpertPlacement(theirs.location(), ep_rank=0, ep_size=2)
    with ParallelHarness(folder, **LAYOUTS["tp2"], ep_num_redundant_experts=4) as harness:
        refused = harness.control(EplbRebalanceReqInput, physical_to_logical_map=theirs.physical_to_logical_LP.tolist())
        assert refused.status_code == 400 and "twice" in refused.message
        assert len(theirs.physical_to_logical_LP) == LAYERS and objections(harness, judge) == []


# --- 70, 71, 74 on one rank -------------------------------------------------------------------------------------------


ONE_RANK_PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]


@pytest.fixture(scope="module")
def one_rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("b4") / "model", seed=5)


def one_rank_answers(harness: Harness) -> list[tuple]:
    results = harness.generate(ONE_RANK_PROMPTS, params={"max_new_tokens": 5})
    return [(result.token_ids, result.logprobs, result.routes.tolist()) for result in results]


def located(rows: list[list[int]]) -> dict:
    return {
        "ep_num_redundant_experts": len(rows[0]) - EXPERTS,
        "init_expert_location": json.dumps({"physical_to_logical_map": rows}),
    }


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_70_71_a_placement_changes_no_result_on_any_path(one_rank_folder: Path, seed: int, native: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.cat([torch.arange(EXPERTS), torch.randint(EXPERTS, (5,), generator=generator)])
    rows = [slots[torch.randperm(len(slots), generator=generator)].tolist() for _ in range(2)]
    settings = {} if native else {"disable_native_kernels": True}
    expected = one_rank_answers(Harness(one_rank_folder, **settings))
    placed = Harness(one_rank_folder, **settings | located(rows))
    assert one_rank_answers(placed) == expected
    placement = placed.scheduler.runner.state.placement
    for layer in range(2):  # the other replica of every expert that has one
        for expert in range(EXPERTS):
            placement._split.slots_LRE[layer, 0, expert] = placement.local_slots(layer, expert)[-1]
    placed.scheduler.cache.flush()
    assert one_rank_answers(placed) == expected
    placement.is_identity = True  # wrong: physical ids taken for logical ones
    placed.scheduler.runner.recorded = None  # a tape has the calls of before
    placed.scheduler.cache.flush()
    assert one_rank_answers(placed) != expected


TWICE_HERE = [[0, 0, 0, 1, 2, 3, 4, 5, 6, 7], [7, 7, 0, 1, 2, 3, 4, 5, 6, 6]]


def copies_agree(one_rank_folder: Path, new: Path) -> bool:
    """Return whether every slot holds its expert after a refresh, read by the placement and not by what wrote it."""
    harness = Harness(one_rank_folder, **located(TWICE_HERE))
    content = logical_tensors(new)
    assert refresh(harness, content, "v1").success
    model = harness.scheduler.runner.state.model
    return all(
        torch.equal(place.read(), content[name])
        for name, entry in model.weights._entries.items()
        for place in entry.places()
    )


def test_74_every_copy_on_one_rank_is_written(
    one_rank_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tiny_checkpoint(tmp_path / "new", seed=6)
    assert copies_agree(one_rank_folder, new)
    every = WeightIndex.places
    monkeypatch.setattr(WeightIndex, "places", lambda self, name: every(self, name)[:1])  # wrong: the first only
    assert not copies_agree(one_rank_folder, new)

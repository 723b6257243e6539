"""Public bugs of expert placement and load statistics that can occur on one rank, by their number in the bug list.

70, 71  wrong results under a placement: a forward path without the logical-to-physical map, or replicas that differ
74      two copies of a hot expert on one rank, of which only the first is written
75      balancedness over the wrong axis
        counts of one map, read with another; a dump of another model taken at start
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eplb.expert_location import ExpertLocationMetadata
from eplb.load_recorder import LoadRecorder
from eplb.load_windows import LoadWindows
from eplb.placement import ExpertPlacement
from rollout.model.weight_loading import WeightIndex
from tests.late_loop import loop  # noqa: F401
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness

EXPERTS = 8
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("b4") / "model", seed=5)


def answers(harness: Harness) -> list[tuple]:
    results = harness.generate(PROMPTS, params={"max_new_tokens": 5})
    return [(result.token_ids, result.logprobs, result.routes.tolist()) for result in results]


def located(rows: list[list[int]]) -> dict:
    return {
        "ep_num_redundant_experts": len(rows[0]) - EXPERTS,
        "init_expert_location": json.dumps({"physical_to_logical_map": rows}),
    }


# --- 70, 71 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_70_71_a_placement_changes_no_result_on_any_path(folder: Path, seed: int, native: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.cat([torch.arange(EXPERTS), torch.randint(EXPERTS, (5,), generator=generator)])
    rows = [slots[torch.randperm(len(slots), generator=generator)].tolist() for _ in range(2)]
    settings = {} if native else {"disable_native_kernels": True}
    expected = answers(Harness(folder, **settings))
    placed = Harness(folder, **settings | located(rows))
    assert answers(placed) == expected
    placement = placed.scheduler.runner.state.placement
    for layer in range(2):  # the other replica of every expert that has one
        for expert in range(EXPERTS):
            placement._split.slots_LRE[layer, 0, expert] = placement.local_slots(layer, expert)[-1]
    placed.scheduler.cache.flush()
    assert answers(placed) == expected
    placement.is_identity = True  # wrong: physical ids taken for logical ones
    placed.scheduler.runner.recorded = None  # a tape has the calls of before
    placed.scheduler.cache.flush()
    assert answers(placed) != expected


# --- 74 ---------------------------------------------------------------------------------------------------------------

TWICE_HERE = [[0, 0, 0, 1, 2, 3, 4, 5, 6, 7], [7, 7, 0, 1, 2, 3, 4, 5, 6, 6]]


def copies_agree(folder: Path, new: Path) -> bool:
    """Return whether every slot holds its expert after a refresh, read by the placement and not by what wrote it."""
    harness = Harness(folder, **located(TWICE_HERE))
    content = logical_tensors(new)
    assert refresh(harness, content, "v1").success
    model = harness.scheduler.runner.state.model
    return all(
        torch.equal(place.read(), content[name])
        for name, entry in model.weights._entries.items()
        for place in entry.places()
    )


def test_74_every_copy_on_one_rank_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tiny_checkpoint(tmp_path / "new", seed=6)
    assert copies_agree(folder, new)
    every = WeightIndex.places
    monkeypatch.setattr(WeightIndex, "places", lambda self, name: every(self, name)[:1])  # wrong: the first only
    assert not copies_agree(folder, new)


# --- 75 ---------------------------------------------------------------------------------------------------------------


class SumsLayersFirst(LoadWindows):
    """Wrong: loads of all layers together, in which layers that are skewed to different sides look even."""

    def rank_balancedness(self, window: int) -> torch.Tensor:
        loads_G = self._rank_loads[self._last(window)].double().sum(dim=(0, 1))
        return (loads_G.mean() / loads_G.max()).expand(self._rank_loads.shape[1])


class MeansOverLayers(LoadWindows):
    """Wrong: mean and maximum over layers, rank by rank."""

    def rank_balancedness(self, window: int) -> torch.Tensor:
        loads_SLG = self._rank_loads[self._last(window)].double()
        return loads_SLG.mean(dim=1).sum(dim=0) / loads_SLG.amax(dim=1).sum(dim=0)


def balancedness_is_right(windows_type: type[LoadWindows]) -> bool:
    windows = windows_type(2, 2)
    windows.add(torch.tensor([[[6, 0, 1, 1], [1, 2, 3, 2]]]))  # 6 : 2 in one layer, 3 : 5 in the other
    return windows.rank_balancedness(10).tolist() == pytest.approx([4 / 6, 4 / 5])


def test_75_balancedness_is_over_ranks_within_a_layer() -> None:
    assert balancedness_is_right(LoadWindows)
    assert not balancedness_is_right(SumsLayersFirst)
    assert not balancedness_is_right(MeansOverLayers)


# --- counts of one map, read with another -----------------------------------------------------------------------------


class Facts:
    weight_version, weight_epoch = "v", 0


def test_counts_before_a_move_are_not_read_with_the_map_after_it() -> None:
    placement = ExpertPlacement(ExpertLocationMetadata(torch.tensor([[0, 1, 2, 3]]), 4))
    recorder = LoadRecorder(1, 4, placement, num_ranks=2)
    hot = torch.tensor([[[0]], [[0]], [[1]]])  # both experts on rank 0
    recorder.note(hot, Facts(), hot[:, 0, 0], hot[:, 0, 0])
    placement.adopt(ExpertLocationMetadata(torch.tensor([[0, 2, 1, 3]]), 4))
    recorder.note(hot, Facts(), hot[:, 0, 0], hot[:, 0, 0])
    dump = recorder.dump({})
    assert dump.tensors["segment_physical_count"].tolist() == [[[2, 1, 0, 0]], [[2, 0, 1, 0]]]
    assert dump.header["windows"][0]["rank_loads"] == [[5, 1]]
    assert dump.header["windows"][0]["rank_balancedness"] == [pytest.approx(3 / 5)]

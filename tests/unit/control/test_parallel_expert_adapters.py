"""Adapters of routed experts where ranks share experts: they move with them, and rows bring theirs along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import BadRequest
from rollout.core.messages.adapters import LoadLoraAdapterReqInput
from rollout.core.messages.experts import EplbRebalanceReqInput
from rollout.core.messages.weights import BeginWeightUpdateReqInput
from rollout.layers.moe.experts import Experts
from rollout.layers.moe.layer import MoELayer
from tests.adapters import logprobs_of, save_adapter
from tests.expert_adapters import STACKS
from tests.family_zoo import family_checkpoint
from tests.parallel_harness import ParallelHarness

SEED = 3
PROMPT = [5, 9, 200, 31, 7, 8, 44, 17]
NEAR = 1e-4  # PEFT's sums are in float32
EP: dict[str, Any] = {"tp_size": 2, "ep_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "ep2, replicas": EP | {"ep_num_redundant_experts": 4},
    "dp2": EP | {"dp_size": 2, "enable_dp_attention": True, "ep_num_redundant_experts": 4},
    "dp2 all-to-all": EP | {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "all_to_all"},
    "all-to-all, slices": EP | {"moe_a2a_backend": "all_to_all"},
}
MOVED = "ep2, replicas"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", SEED)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of two contents."""
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": list(STACKS), "r": 2}
    paths = [tmp_path_factory.mktemp("a") for _ in range(2)]
    return [save_adapter(path, "qwen3_moe", SEED, seed, lora_alpha=4, **settings) for seed, path in enumerate(paths)]


def engine(folder: Path, layout: str, **settings: Any) -> ParallelHarness:
    given = {"enable_lora": True, "max_loras_per_batch": 2, "max_lora_rank": 2, "lora_target_modules": "all"}
    return ParallelHarness(
        folder, **LAYOUTS[layout], **given | {"dtype": "float64", "enable_return_routed_experts": False} | settings
    )


def load(harness: ParallelHarness, path: Path, name: str) -> None:
    assert harness.control(LoadLoraAdapterReqInput, lora_name=name, lora_path=str(path)).success


def distance(harness: ParallelHarness, content: Path | None, name: str | None) -> float:
    """Return how far an answer of each data-parallel rank is from PEFT's forward; only the first has an adapter."""
    names = [name, *[None] * (harness.num_dp_ranks - 1)]
    rids = [
        harness.submit(PROMPT, params={"max_new_tokens": 2}, lora_name=each, dp_rank=rank)
        for rank, each in enumerate(names)
    ]
    harness.run()
    found = []
    for rid, path in zip(rids, [content, *[None] * (len(names) - 1)], strict=True):
        result = harness.results[rid]
        want = logprobs_of("qwen3_moe", SEED, path, [*PROMPT, *result.token_ids])[len(PROMPT) - 1 :]
        found += [abs(a - b) for a, b in zip(result.logprobs, want, strict=True)]
    return max(found)


def map_of(shift: int) -> list[list[int]]:
    """Return a map [L, P] of eight experts onto twelve slots of two ranks; six experts from `shift` on are first."""
    first = [(expert + shift) % 8 for expert in range(6)]
    second = [(expert + shift + 6) % 8 for expert in range(6)]
    return [[*first, *second[::-1]] for _ in range(2)]


def rebalance(harness: ParallelHarness, shift: int) -> None:
    answer = harness.control(EplbRebalanceReqInput, physical_to_logical_map=map_of(shift))
    assert answer.success and answer.data["rebalanced"], answer.message


@pytest.mark.parametrize(
    "layout",
    [each if each in (MOVED, "dp2 all-to-all") else pytest.param(each, marks=pytest.mark.full) for each in LAYOUTS],
)
def test_every_layout_agrees_with_peft(layout: str, folder: Path, contents: list[Path]) -> None:
    with engine(folder, layout) as harness:
        load(harness, contents[0], "poet")
        assert distance(harness, contents[0], "poet") < NEAR
        assert distance(harness, None, None) < NEAR
        harness.check_idle()


def moved(folder: Path, contents: list[Path]) -> list[float]:
    """Move experts with an adapter in memory, load another one, and move them again; return all distances."""
    with engine(folder, MOVED) as harness:
        load(harness, contents[0], "poet")
        rebalance(harness, 3)
        found = [distance(harness, contents[0], "poet")]
        load(harness, contents[1], "clerk")
        found.append(distance(harness, contents[1], "clerk"))
        rebalance(harness, 5)
        found += [distance(harness, content, name) for content, name in zip(contents, ("poet", "clerk"), strict=True)]
        return [*found, distance(harness, None, None)]


def test_adapters_move_with_their_experts(folder: Path, contents: list[Path]) -> None:
    assert max(moved(folder, contents)) < NEAR


@pytest.mark.mutant
def test_experts_that_move_without_adapters_are_noticed(
    folder: Path, contents: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Experts, "slot_tensors", lambda self: [self.w13, self.w2])
    assert max(moved(folder, contents)) > 10 * NEAR


@pytest.mark.mutant
def test_rows_that_leave_their_adapters_are_noticed(
    folder: Path, contents: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MoELayer, "_carried", lambda *_: None)
    with engine(folder, "dp2 all-to-all") as harness:
        load(harness, contents[0], "poet")
        assert distance(harness, contents[0], "poet") > 10 * NEAR


def test_an_update_does_not_adopt_a_placement(folder: Path, contents: list[Path]) -> None:
    """The adapters of experts do not come with an update of the model, which would leave them in other places."""
    with engine(folder, MOVED, enable_eplb=True) as harness:
        refused = harness.control(BeginWeightUpdateReqInput, update_id="u", adopt_placement=True)
        assert refused.status_code == BadRequest.status_code
        assert "without memory for adapters (--lora-target-modules)" in refused.message

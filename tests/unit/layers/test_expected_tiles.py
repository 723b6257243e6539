"""Tiles of experts on several ranks: every dispatcher tells the rows that a rank expects, and padding does not count.

Tokens choose experts evenly.  So a rank's experts have as many rows each as on one rank, and the tiles are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from tests import interpreted  # before any kernel

# isort: split
from eplb.expert_location import trivial_location
from rollout.core.specs.layer_specs import MoESpec, RouterSpec
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.kernels import ops
from rollout.kernels.gpu import experts_lora, fused_experts, packed_experts
from rollout.kernels.gpu.experts_plan import EXPERT_TILES, Tiles
from rollout.layers.build import Build
from rollout.layers.lora import SlotSizes
from rollout.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from rollout.layers.moe.dispatchers.all_tokens import AllTokensDispatcher
from rollout.layers.moe.dispatchers.base import Dispatcher, LocalDispatcher
from rollout.layers.moe.dispatchers.deep_ep import DeepEpDispatcher
from rollout.layers.moe.dispatchers.deep_ep_library import DeepEpModeName, DeepEpShape
from rollout.layers.moe.experts import Experts
from tests.deepep_stand_in import stand_in
from tests.fixed_numerics import fixed_numerics
from tests.gpu_expert_cases import draw, with_empty_slots
from tests.model_zoo import placed
from tests.nccl_stand_in import stand_in_transport
from tests.ranks import run_ranks

EXPERTS, TOP_K, TOKENS, HIDDEN = 16, 4, 64, 2048
BF16 = torch.bfloat16
WANTED = EXPERT_TILES[2][1][1]  # of R = 16


class Chosen(NamedTuple):
    """The load that tiles were chosen for, the number of experts, and the tiles."""

    load: int
    experts: int
    tiles: Tiles


ONE_RANK = Chosen(TOKENS * TOP_K, EXPERTS, WANTED)


def deep_ep(generation: str, mode: DeepEpModeName) -> Callable[[Parallel], Dispatcher]:
    def make(parallel: Parallel) -> Dispatcher:
        size = parallel.tp.size
        shape = DeepEpShape(HIDDEN, EXPERTS, TOP_K, BF16, size, TOKENS, max_low_latency_tokens=TOKENS, mode=mode)
        return DeepEpDispatcher(stand_in(parallel.tp, generation, 0), parallel.tp, shape, has_rdma=True)

    return make


DISPATCHERS: dict[str, Callable[[Parallel], Dispatcher]] = {
    "all tokens": lambda parallel: AllTokensDispatcher(parallel, EXPERTS),
    "all tokens of groups": lambda parallel: AllTokensDispatcher(parallel, EXPERTS),
    "all_to_all": lambda parallel: AllToAllDispatcher(parallel, EXPERTS),
    "normal": deep_ep("normal", "normal"),
    "low latency": deep_ep("1.2", "low_latency"),
    "elastic": deep_ep("2.1", "normal"),
    "elastic, fixed rows": deep_ep("2.1", "low_latency"),
}


class NotRun:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Chosen]:
    """Note the choices of experts that compute nothing."""
    found: list[Chosen] = []
    choose = fused_experts.choose_tiles

    def noted(load: int, experts: int, dtype: torch.dtype) -> Tiles:
        found.append(Chosen(load, experts, choose(load, experts, dtype)))
        return found[-1].tiles

    for module in (fused_experts, packed_experts):
        monkeypatch.setattr(module, "choose_tiles", noted)
    for name in ("_plan", "_gate_up", "_down"):
        monkeypatch.setattr(fused_experts, name, lambda *_: None)
    monkeypatch.setattr(fused_experts, "_weighted_sum", lambda out_TKD, *_: out_TKD[:, 0])
    monkeypatch.setattr(packed_experts, "packed_plan_kernel", NotRun())
    for name in ("gate_up", "add_down"):
        monkeypatch.setattr(experts_lora.Adapters, name, lambda *_: None)
    return found


def step(parallel: Parallel, dispatcher: Dispatcher, tokens: list[int], adapted: bool) -> None:
    """Compute the experts of this rank for a step to which each rank brings that many tokens, and combine."""
    build = Build(interpreted.interpreted_ops(), BF16, "cpu", parallel)
    spec = MoESpec(router=RouterSpec(num_experts=EXPERTS, top_k=TOP_K), inner=16)
    experts = Experts(spec, HIDDEN, 0, placed(trivial_location(1, EXPERTS), parallel), build)
    count, before = tokens[parallel.tp.rank], sum(tokens[: parallel.tp.rank])
    choices = torch.arange(before * TOP_K, (before + count) * TOP_K).view(-1, TOP_K)
    slots = None
    if adapted:
        experts.reserve_lora(SlotSizes(1, 4))
        slots = torch.zeros(count, dtype=torch.int64)
    dispatcher.plan_step(tokens)
    hidden, weights = torch.zeros(count, HIDDEN, dtype=BF16), torch.ones(count, TOP_K, dtype=BF16)
    work = dispatcher.dispatch(hidden, choices % EXPERTS, weights, slots)
    dispatcher.combine(experts(work), work.handle)


def layout_of(name: str, size: int) -> ParallelLayout:
    groups = {"dp_size": size, "enable_dp_attention": True} if name != "all tokens" else {}
    return ParallelLayout(tp_size=size, ep_size=size, **groups)


def choices_of(name: str, size: int, tokens: list[int], chosen: list[Chosen], adapted: bool = False) -> list[Chosen]:
    """Return what the ranks choose, in any order."""
    chosen.clear()
    make = DISPATCHERS[name]
    run_ranks(
        layout_of(name, size),
        lambda parallel: step(parallel, make(parallel), tokens, adapted),
        20.0,
        stand_in_transport,
    )
    return chosen


def test_one_rank_counts_all_slots(chosen: list[Chosen]) -> None:
    step(Parallel(), LocalDispatcher(), [TOKENS], adapted=False)
    step(Parallel(), LocalDispatcher(), [TOKENS], adapted=True)
    assert chosen == [ONE_RANK, ONE_RANK]


@pytest.mark.full(but=("2", "4", "8-all tokens", "8-low latency"))
@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_take_the_tiles_of_one_rank(name: str, size: int, chosen: list[Chosen]) -> None:
    tokens = [TOKENS if name == "all tokens" else TOKENS // size] * size
    wanted = [Chosen(ONE_RANK.load // size, EXPERTS // size, WANTED)] * size
    assert choices_of(name, size, tokens, chosen) == wanted


@pytest.mark.parametrize("name", DISPATCHERS)
def test_tokens_with_adapters_change_no_tiles(name: str, chosen: list[Chosen]) -> None:
    """Low-latency mode has no kernel of rows by expert for them: its rows are slots, most of which are empty."""
    tokens = [TOKENS if name == "all tokens" else TOKENS // 2] * 2
    wanted = [Chosen(ONE_RANK.load // 2, EXPERTS // 2, WANTED)] * 2
    assert choices_of(name, 2, tokens, chosen, adapted=True) == wanted


@pytest.mark.parametrize("name", [name for name in DISPATCHERS if name != "all tokens"])
def test_an_idle_rank_takes_the_same_tiles(name: str, chosen: list[Chosen]) -> None:
    """The tokens of the other rank count."""
    wanted = [Chosen(ONE_RANK.load // 2, EXPERTS // 2, WANTED)] * 2
    assert choices_of(name, 2, [TOKENS, 0], chosen) == wanted


def test_more_rows_than_came_are_not_expected(chosen: list[Chosen]) -> None:
    case = draw(3, top_k=2, experts=4, dtype=torch.float16)
    fused_experts.fused_experts(*case.arguments(), expected=1000)  # type: ignore[arg-type]
    assert [one.load for one in chosen] == [6]


def test_the_operators_of_a_gpu_pass_the_expected_number_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one they are the operators of torch's registry, which may have the processor's here."""
    monkeypatch.setattr(ops, "_registered", lambda: dict.fromkeys(ops.OPERATORS, lambda *_: "the registry's"))
    made, found = ops.gpu_ops(), []
    arguments = draw(3, dtype=torch.float32).arguments()
    wanted = fused_experts.fused_experts(*arguments)  # type: ignore[arg-type]
    monkeypatch.setattr(fused_experts, "choose_tiles", lambda load, *_: found.append(load) or WANTED)
    assert made.fused_experts(*arguments) == "the registry's"
    assert found == []
    torch.testing.assert_close(made.fused_experts(*arguments, expected=1), wanted)
    assert found == [1]


def bits_by_tiles() -> list[torch.Tensor]:
    """Return the outputs with tiles of 16, 32, 64 and 128 columns, each element one sum in the order of a device."""
    case = with_empty_slots(draw(52, experts=2, inner=16), ids=(-1, 2))
    with fixed_numerics():
        return [
            fused_experts.fused_experts(*case.arguments(), expected=load)  # type: ignore[arg-type]
            for load in (1, 20, 60, None)
        ]


def test_the_expected_number_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some slots are another rank's.  Tiles that change the order of sums over the depth are noticed."""
    monkeypatch.setitem(EXPERT_TILES, 4, EXPERT_TILES[2])
    first, *others = bits_by_tiles()
    assert all(torch.equal(other, first) for other in others)
    usual = fused_experts.product_constants
    monkeypatch.setattr(
        fused_experts,
        "product_constants",
        lambda tiles, *rest: usual(tiles, *rest) | {"BLOCK_K": 32 if tiles.tokens == 16 else 16},
    )
    wrong, *others = bits_by_tiles()
    assert torch.equal(wrong, first) and not any(torch.equal(other, first) for other in others)

"""The contract of every dispatcher: each token gets the weighted sum of its experts' outputs, wherever they are.

Real groups, real experts; the reference is the same experts on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from eplb.expert_location import ExpertLocationMetadata
from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import MoESpec, RouterSpec
from rollout.distributed.communicator import pack_rows, share_sizes, unpack_rows
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.kernels.ops import Ops
from rollout.layers.build import Build
from rollout.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from rollout.layers.moe.dispatchers.all_tokens import AllTokensDispatcher
from rollout.layers.moe.dispatchers.base import Dispatcher, DispatchOutput, LocalDispatcher
from rollout.layers.moe.dispatchers.select import DispatcherNeeds, MoeBackend, select_dispatcher, tokens_by_rank
from rollout.layers.moe.experts import Experts
from tests.model_zoo import placed
from tests.ranks import run_ranks
from tests.row_ops import row_ops

HIDDEN, INNER, EXPERTS, TOP_K = 12, 8, 8, 3
F64 = torch.float64
NAMES = ["none", "all_to_all"]
KEEPS_ORDER = ["all_to_all"]  # the sum over a token's choices runs in their order


def layout_of(tp: int, dp: int, ep: int) -> ParallelLayout:
    return ParallelLayout(tp, dp, ep, enable_dp_attention=dp > 1)


# Ranks of the engine, attention-DP ranks, expert-parallel ranks.
LAYOUTS = {
    "none": [(2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 2), (4, 2, 2), (4, 4, 4), (4, 2, 1)],
    "all_to_all": [(2, 1, 2), (2, 2, 2), (4, 1, 4), (4, 2, 4), (4, 4, 4)],
}
TRIVIAL = list(range(EXPERTS))
# On 2 and on 4 ranks no expert is twice on one.
REDUNDANT = [7, 2, 5, 0, 3, 6, 1, 4, 2, 5, 7, 0]

# Tokens of each attention-DP rank, taken in turn, and the experts that they choose.
CASES: dict[str, tuple[list[int], list[int]]] = {
    "ragged": ([5, 1, 3, 2], [0, 1, 2, 3, 4, 5, 6, 7]),
    "an idle rank": ([4, 0, 3, 0], [6, 0, 4, 2, 1, 7, 3, 5]),
    "one token in all": ([0, 1, 0, 0], [5, 2, 3]),
    "no token at all": ([0, 0, 0, 0], [0, 1, 2]),
    "fewer tokens than ranks": ([1, 2, 1, 1], [7, 1, 4]),
    "three experts get everything": ([6, 4, 5, 7], [3, 4, 5]),
    "one rank's experts get everything": ([6, 4, 5, 7], [1, 0, 1, 0, 0, 1]),
    "most experts get nothing": ([6, 2, 1, 3], [0, 7, 3]),
}


SPEC = MoESpec(router=RouterSpec(num_experts=EXPERTS, top_k=TOP_K), inner=INNER)


def filled_experts(parallel: Parallel, located: Sequence[int], ops: Ops) -> Experts:
    """Return this rank's experts, written through the entries that loading a checkpoint uses."""
    metadata = ExpertLocationMetadata(torch.tensor([list(located)]), EXPERTS)
    experts = Experts(SPEC, HIDDEN, 0, placed(metadata, parallel), Build(ops, F64, "cpu", parallel))
    for entry in experts.weight_entries("experts"):
        seed = sum(map(ord, entry.name))
        content = torch.randn(entry.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
        for place in entry.places():
            place.write(content)
    return experts


class Batch:
    """Tokens of one attention-DP rank: `logical_ids` and their weights [T, K]."""

    def __init__(self, case: str, dp_rank: int) -> None:
        counts, chosen = CASES[case]
        generator = torch.Generator().manual_seed(dp_rank)
        self.hidden_TD = torch.randn(counts[dp_rank], HIDDEN, dtype=F64, generator=generator)
        self.weights_TK = torch.rand(counts[dp_rank], TOP_K, dtype=F64, generator=generator)
        cycle = torch.tensor(chosen).repeat(40)
        self.logical_ids_TK = cycle[dp_rank : dp_rank + counts[dp_rank] * TOP_K].view(-1, TOP_K)


def make(name: str, parallel: Parallel, located: Sequence[int]) -> Dispatcher:
    needs = DispatcherNeeds(
        parallel=parallel,
        backend=MoeBackend(name),
        num_physical_experts=len(located),
        hidden_size=HIDDEN,
        top_k=TOP_K,
        dtype=F64,
        device=torch.device("cpu"),
    )
    return select_dispatcher(needs)


def outputs(
    name: str,
    layout: ParallelLayout,
    cases: Sequence[str],
    located: Sequence[int] = REDUNDANT,
    kind: type[Dispatcher] | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Return by case the outputs for the tokens of each attention-DP rank, whose ranks must all get the same."""

    def work(parallel: Parallel) -> list[torch.Tensor]:
        experts = filled_experts(parallel, located, row_ops())
        dispatcher = make(name, parallel, located)
        if kind is not None:
            dispatcher = kind(parallel, len(located))  # type: ignore[call-arg]
        return [forward(dispatcher, experts, parallel, case) for case in cases]

    by_rank = run_ranks(layout, work)
    found: dict[str, list[torch.Tensor]] = {}
    for number, case in enumerate(cases):
        groups = [
            by_rank[first : first + layout.attn_tp_size] for first in range(0, layout.tp_size, layout.attn_tp_size)
        ]
        for group in groups:
            assert all(torch.equal(rank[number], group[0][number]) for rank in group[1:])
        found[case] = [group[0][number] for group in groups]
    return found


def forward(dispatcher: Dispatcher, experts: Experts, parallel: Parallel, case: str) -> torch.Tensor:
    layout, position = parallel.layout, parallel.position
    counts = CASES[case][0][: layout.attn_dp_size]
    batch = Batch(case, position.attn_dp_rank)
    mine = slice(None)
    shares = share_sizes(counts[position.attn_dp_rank], layout.attn_tp_size)
    if dispatcher.scatters_tokens:
        start = sum(shares[: position.attn_tp_rank])
        mine = slice(start, start + shares[position.attn_tp_rank])
    dispatcher.plan_step(tokens_by_rank(layout, counts, scattered=dispatcher.scatters_tokens))
    first_row = mine.start or 0
    physical_ids_TK = experts.placement.logical_to_physical(0, batch.logical_ids_TK[mine], first_row)
    work = dispatcher.dispatch(batch.hidden_TD[mine], physical_ids_TK, batch.weights_TK[mine])
    out_TD = dispatcher.combine(experts(work), work.handle)
    return parallel.attn_tp.all_gather_rows(out_TD, shares) if dispatcher.scatters_tokens else out_TD


def reference(case: str, dp_size: int) -> list[torch.Tensor]:
    experts, dispatcher = filled_experts(Parallel(), TRIVIAL, row_ops()), LocalDispatcher()
    return [forward_locally(dispatcher, experts, Batch(case, dp_rank)) for dp_rank in range(dp_size)]


def forward_locally(dispatcher: Dispatcher, experts: Experts, batch: Batch) -> torch.Tensor:
    work = dispatcher.dispatch(batch.hidden_TD, batch.logical_ids_TK, batch.weights_TK)
    return dispatcher.combine(experts(work), work.handle)


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    return max((float((a - b).abs().max()) for a, b in zip(found, expected) if a.numel()), default=0.0)


def check(name: str, layout: ParallelLayout, located: Sequence[int], kind: type[Dispatcher] | None = None) -> None:
    """Check that each token gets the output that it gets on one rank; raise `AssertionError` otherwise."""
    found = outputs(name, layout, list(CASES), located, kind)
    for case in CASES:
        difference = largest_difference(found[case], reference(case, layout.attn_dp_size))
        assert difference == 0.0 if name in KEEPS_ORDER else difference < 1e-12, case


@pytest.mark.full(but=("none-sizes4", "all_to_all-sizes11"))
@pytest.mark.parametrize("located", [TRIVIAL, REDUNDANT], ids=["trivial", "redundant"])
@pytest.mark.parametrize(("name", "sizes"), [(name, sizes) for name in NAMES for sizes in LAYOUTS[name]])
def test_the_outputs_are_those_of_one_rank(name: str, sizes: tuple[int, int, int], located: list[int]) -> None:
    check(name, layout_of(*sizes), located)


def test_one_rank_moves_nothing_under_any_name() -> None:
    for name in NAMES:
        assert isinstance(make(name, Parallel(), TRIVIAL), LocalDispatcher)


def test_what_cannot_be_is_one_clear_line() -> None:
    with pytest.raises(StartupError, match=r"--moe-a2a-backend 'nccl' is not known; choose from none, all_to_all"):
        make("nccl", Parallel(), TRIVIAL)

    def work(parallel: Parallel) -> None:
        with pytest.raises(StartupError, match=r"all_to_all .* needs --ep-size equal to --tp-size, got 1 and 2"):
            make("all_to_all", parallel, TRIVIAL)

    run_ranks(layout_of(2, 1, 1), work)


def test_packed_rows_come_back() -> None:
    rows = [torch.randn(5, 3).bfloat16(), torch.arange(10, dtype=torch.int32).view(5, 2), torch.randn(5, 1, dtype=F64)]
    back = unpack_rows(pack_rows(rows).clone(), rows)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back, rows, strict=True))
    none = [row[:0] for row in rows]
    assert [part.shape for part in unpack_rows(pack_rows(none), none)] == [(0, 3), (0, 2), (0, 1)]


def test_tokens_that_ranks_bring() -> None:
    layout = layout_of(4, 2, 4)
    assert tokens_by_rank(layout, [5, 0], scattered=False) == [5, 5, 0, 0]
    assert tokens_by_rank(layout, [5, 1], scattered=True) == [3, 2, 1, 0]


# --- dispatchers that forgot something --------------------------------------------------------------------------------


class AddsNothingUp(AllTokensDispatcher):
    """A wrong dispatcher: each rank keeps its own part of the sum."""

    def combine(self, expert_out: torch.Tensor, handle: None) -> torch.Tensor:
        return expert_out


class TakesOthersSlots(AllTokensDispatcher):
    """A wrong dispatcher: it takes a slot of another rank for its own slot of the same number."""

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DispatchOutput:
        work = super().dispatch(hidden_TD, physical_ids_TK, weights_TK)
        work.local_physical_ids_RS = work.ids_RS % (EXPERTS // 2)  # of two ranks
        return work


class KeepsTheOrderOfArrival(AllToAllDispatcher):
    """A wrong dispatcher: outputs come back by rank, and it takes them for outputs in the order of its tokens."""

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> DispatchOutput:
        work = super().dispatch(hidden_TD, physical_ids_TK, weights_TK)
        work.handle = replace(work.handle, order_A=torch.arange(work.handle.order_A.shape[0]))
        return work


class WeighsNothing(AllToAllDispatcher):
    """A wrong dispatcher: it sums outputs without their weights."""

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        ones = replace(handle, weights_TK=torch.ones_like(handle.weights_TK))
        return super().combine(expert_out, ones)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("none", AddsNothingUp),
        ("none", TakesOthersSlots),
        ("all_to_all", KeepsTheOrderOfArrival),
        ("all_to_all", WeighsNothing),
    ],
)
def test_wrong_dispatchers_are_caught(name: str, wrong: type[Dispatcher]) -> None:
    with pytest.raises(AssertionError):
        check(name, layout_of(2, 1, 2), TRIVIAL, wrong)


def test_experts_leave_holes_at_zero() -> None:
    experts = filled_experts(Parallel(), TRIVIAL, row_ops())
    hidden_RD = torch.randn(3, HIDDEN, dtype=F64)
    ids_RS = torch.tensor([[4, -1, 0], [-1, EXPERTS, -5], [EXPERTS + 3, 7, 2]])
    is_empty_RS = (ids_RS < 0) | (ids_RS >= EXPERTS)
    weights_RS = torch.rand(3, 3, dtype=F64)
    weights_RS[is_empty_RS] = float("nan")
    unweighted = experts(DispatchOutput(hidden_RD, ids_RS, None, None, has_holes=True))
    full = experts(DispatchOutput(hidden_RD, ids_RS.clamp(0, EXPERTS - 1), None, None))
    assert torch.equal(unweighted, torch.where(is_empty_RS[..., None], 0.0, full))
    weighted = experts(DispatchOutput(hidden_RD, ids_RS, weights_RS, None, has_holes=True))
    assert torch.equal(weighted, (unweighted * weights_RS.nan_to_num(0.0)[..., None]).sum(1))
    nothing = experts(DispatchOutput(hidden_RD, torch.full((3, 3), -1), weights_RS, None, has_holes=True))
    assert not nothing.any()

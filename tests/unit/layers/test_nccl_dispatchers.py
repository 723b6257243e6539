"""Dispatchers with tokens on devices: the bits that they give on hosts, and how often the host waits in a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from rollout.layers.moe.dispatchers.all_tokens import AllTokensDispatcher
from rollout.layers.moe.dispatchers.base import Dispatcher, DispatchOutput
from tests.nccl_stand_in import OnDevice, devices, memory_of, on_device, stand_in_transport
from tests.ranks import run_ranks

EXPERTS, HIDDEN, TOP_K = 8, 48, 3
COUNTS = [[5, 0, 3, 1], [0, 0, 1, 0], [0, 0, 0, 0], [70, 64, 9, 33]]  # tokens of each rank, step by step

Make = Callable[[Parallel], Dispatcher]


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    with devices():
        yield


def all_tokens(parallel: Parallel) -> Dispatcher:
    return AllTokensDispatcher(parallel, EXPERTS)


def all_to_all(parallel: Parallel) -> Dispatcher:
    return AllToAllDispatcher(parallel, EXPERTS)


def experts(work: DispatchOutput, first: int, num_local: int) -> torch.Tensor:
    """Run the experts: expert e multiplies by e + 1."""
    ids_RS = work.ids_RS.masked_fill(work.ids_RS >= num_local, -1)
    scale_RS = (ids_RS + first + 1).masked_fill(ids_RS < 0, 0).to(work.hidden_RD.dtype)
    out_RSD = work.hidden_RD.unsqueeze(1) * scale_RS.unsqueeze(2)
    if work.weights_RS is None:
        return out_RSD
    return (out_RSD * work.weights_RS.masked_fill(ids_RS < 0, 0).unsqueeze(2)).sum(1)


def steps(parallel: Parallel, dispatcher: Dispatcher, shares_tokens: bool, placed: Any) -> list[torch.Tensor]:
    rank, out = parallel.tp.rank, []
    for number, counts in enumerate(COUNTS):
        counts = [counts[0]] * parallel.tp.size if shares_tokens else counts[: parallel.tp.size]
        random = torch.Generator().manual_seed(number if shares_tokens else 100 * number + rank)
        hidden_TD = torch.randn(counts[rank], HIDDEN, generator=random).bfloat16()
        ids_TK = torch.rand(counts[rank], EXPERTS, generator=random).argsort(1)[:, :TOP_K]
        weights_TK = torch.rand(counts[rank], TOP_K, generator=random).bfloat16()
        dispatcher.plan_step(counts)
        work = dispatcher.dispatch(placed(hidden_TD), placed(ids_TK), placed(weights_TK))
        num_local = EXPERTS // parallel.tp.size
        sums = experts(work, rank * num_local, num_local)
        out.append(dispatcher.combine(sums, work.handle))
    return out


def host_waits(layout: ParallelLayout, make: Make) -> list[list[str]]:
    """Return by rank the calls of all steps that made the host wait.

    Assert that devices give the bits that hosts give, and that hosts exchange nothing meanwhile.
    """
    shares_tokens = make is all_tokens and not layout.enable_dp_attention

    def work(parallel: Parallel) -> list[str]:
        OnDevice.local.host_waits = []
        wanted = steps(parallel, make(parallel), shares_tokens, lambda tensor: tensor)
        for group in (parallel.tp, parallel.attn_dp):
            group.host = None
        found = steps(parallel, make(parallel), shares_tokens, on_device)
        waits = OnDevice.local.host_waits
        assert all(isinstance(tensor, OnDevice) for tensor in found)
        assert all(torch.equal(memory_of(a.clone()), b) for a, b in zip(found, wanted, strict=True))
        return waits

    return run_ranks(layout, work, 20.0, stand_in_transport)


@pytest.mark.parametrize("size", [2, 4])
def test_all_tokens_to_all_ranks_without_a_wait(size: int) -> None:
    assert host_waits(ParallelLayout(tp_size=size, ep_size=size), all_tokens) == [[]] * size
    groups = ParallelLayout(tp_size=size, dp_size=size, ep_size=size, enable_dp_attention=True)
    assert host_waits(groups, all_tokens) == [[]] * size


@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all_waits_once_a_layer_for_all_counts(size: int) -> None:
    layout = ParallelLayout(tp_size=size, dp_size=size, ep_size=size, enable_dp_attention=True)
    assert host_waits(layout, all_to_all) == [["tolist"] * len(COUNTS)] * size


def test_what_can_be_captured_says_so() -> None:
    def work(parallel: Parallel) -> tuple[bool, bool]:
        made = all_tokens(parallel), all_to_all(parallel)
        first, second = (dispatcher.capture_obstacle([4, 4]) is None for dispatcher in made)
        return first, second

    layout = ParallelLayout(tp_size=2, ep_size=2)
    groups = ParallelLayout(tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True)
    for sizes in (layout, groups):
        assert run_ranks(sizes, work, 20.0, stand_in_transport) == [(True, False)] * 2
        assert run_ranks(sizes, work, 20.0) == [(False, False)] * 2  # over gloo, which no graph captures


class CountsWithBincount(AllToAllDispatcher):
    """A wrong dispatcher: it waits for the largest rank, for its own counts, and then for counts of others."""

    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        (ids_TK.flatten() // self._num_local_experts).bincount(minlength=self._tp.size).tolist()
        return super().dispatch(hidden_TD, ids_TK, weights_TK)


class CountsBetweenHosts(AllToAllDispatcher):
    def dispatch(self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        self._tp.gather_ints([ids_TK.shape[0]])
        return super().dispatch(hidden_TD, ids_TK, weights_TK)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [CountsWithBincount, CountsBetweenHosts])
def test_a_dispatcher_that_waits_too_often_is_noticed(wrong: type[AllToAllDispatcher]) -> None:
    layout = ParallelLayout(tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True)
    with pytest.raises(AssertionError):
        assert host_waits(layout, lambda parallel: wrong(parallel, EXPERTS)) == [["tolist"] * len(COUNTS)] * 2

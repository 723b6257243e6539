"""Layouts and collectives: positions, sums in rank order, ragged rows, a lost rank."""

from __future__ import annotations

import os
import signal
import time
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.errors import StartupError
from rollout.distributed.communicator import RankLostError, share_sizes
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from tests.rank_processes import TIMEOUT_S, run_rank_processes
from tests.ranks import run_ranks


def test_positions_of_the_drawing() -> None:
    layout = ParallelLayout(tp_size=4, dp_size=2, ep_size=2, enable_dp_attention=True)
    found = [(p.attn_dp_rank, p.attn_tp_rank, p.ep_rank, p.moe_tp_rank) for p in map(layout.position, range(4))]
    assert found == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]
    assert [p.is_dp_leader for p in map(layout.position, range(4))] == [True, False, True, False]


@pytest.mark.parametrize("tp_size", [16, 32, 64])
@pytest.mark.parametrize("attn_dp", [1, 4, 16])
@pytest.mark.parametrize("ep_size", [1, 4, 16])
def test_every_rank_of_a_large_layout_has_a_place_of_its_own(tp_size: int, attn_dp: int, ep_size: int) -> None:
    layout = ParallelLayout(tp_size=tp_size, dp_size=attn_dp, ep_size=ep_size, enable_dp_attention=True)
    found = [layout.position(rank) for rank in range(layout.world_size)]
    attention, experts = (product(range(n), range(tp_size // n)) for n in (attn_dp, ep_size))
    assert [(p.attn_dp_rank, p.attn_tp_rank) for p in found] == list(attention)
    assert [(p.ep_rank, p.moe_tp_rank) for p in found] == list(experts)
    assert [p.world_rank for p in found if p.is_tp_leader] == [0]
    assert sum(p.is_dp_leader for p in found) == attn_dp


def test_replicas_without_dp_attention() -> None:
    layout = ParallelLayout(tp_size=2, dp_size=3)
    assert (layout.world_size, layout.num_replicas, layout.attn_tp_size) == (6, 3, 2)
    assert [(layout.position(r).replica, layout.position(r).tp_rank) for r in range(6)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ({"tp_size": 65}, "need 65 ranks; a server has at most 64"),
        ({"tp_size": 16, "dp_size": 5}, "need 80 ranks; a server has at most 64"),
        ({"tp_size": 16, "ep_size": 6}, "--ep-size 6"),
        ({"tp_size": 16, "dp_size": 6, "enable_dp_attention": True}, "--dp-size 6"),
        ({"tp_size": 0}, "--tp-size"),
        ({"tp_size": 4, "ep_size": 3}, "--ep-size 3"),
        ({"tp_size": 4, "dp_size": 3, "enable_dp_attention": True}, "--dp-size 3"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict, flag: str) -> None:
    with pytest.raises(StartupError, match=flag):
        ParallelLayout(**sizes)


def _exercise(parallel: Parallel) -> dict[str, object]:
    tp = parallel.tp
    counts = share_sizes(5, tp.size)
    rows = torch.arange(5.0, dtype=torch.float64).view(5, 1) * (tp.rank + 1)
    mine = torch.full((counts[tp.rank], 2), tp.rank, dtype=torch.int16)
    return {
        "sum": tp.all_reduce(rows),
        "long sum": tp.all_reduce(rows.expand(5, 4000).contiguous())[:, 7],
        "share": tp.reduce_scatter_rows(rows, counts),
        "rows": tp.all_gather_rows(mine, counts),
        "bytes": tp.gather_bytes(b"x" * tp.rank),
        "agree": (tp.all_agree(True), tp.all_agree(tp.rank != 1), tp.any_of(tp.rank == 1)),
        "root": tp.broadcast(torch.full((3,), tp.rank), root=1),
    }


@pytest.mark.parametrize("size", [2, 4, 16])
def test_collectives_return_what_a_count_by_hand_gives(size: int) -> None:
    counts = share_sizes(5, size)
    total = torch.arange(5.0, dtype=torch.float64).view(5, 1) * sum(range(1, size + 1))
    for rank, found in enumerate(run_ranks(ParallelLayout(tp_size=size), _exercise)):
        start = sum(counts[:rank])
        assert torch.equal(found["sum"], total)
        assert torch.equal(found["long sum"], total.flatten())
        assert torch.equal(found["share"], total[start : start + counts[rank]])
        assert found["rows"].tolist() == [[r, r] for r in range(size) for _ in range(counts[r])]
        assert found["bytes"] == [b"x" * r for r in range(size)]
        assert found["agree"] == (True, False, True)
        assert found["root"].tolist() == [1, 1, 1]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=9, max_size=9), st.integers(0, 2**31))
def test_rows_reach_their_ranks(flat_counts: list[int], seed: int) -> None:
    counts = torch.tensor(flat_counts).view(3, 3)
    rows = torch.rand(3, 9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def work(parallel: Parallel) -> torch.Tensor:
        me = parallel.tp.rank
        send = counts[me].tolist()
        return parallel.tp.all_to_all(rows[me, : sum(send)], send, counts[:, me].tolist())

    for rank, found in enumerate(run_ranks(ParallelLayout(tp_size=3), work)):
        starts = counts.cumsum(1) - counts
        want = [rows[peer, starts[peer, rank] : starts[peer, rank] + counts[peer, rank]] for peer in range(3)]
        assert torch.equal(found, torch.cat(want))


def test_sums_do_not_depend_on_what_else_is_summed() -> None:
    """bfloat16 over four ranks: a row alone has the bits that it has among many (a ring's order would differ)."""
    rows = torch.randn(4, 3000, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        mine = rows[parallel.tp.rank]
        return parallel.tp.all_reduce(mine), parallel.tp.all_reduce(mine[1500:1501])

    results = run_ranks(ParallelLayout(tp_size=4), work)
    for many, alone in results:
        assert torch.equal(many[1500:1501], alone)
        assert torch.equal(many, results[0][0])


def test_two_ranks_exchange_tensors_with_each_other() -> None:
    def work(parallel: Parallel) -> torch.Tensor:
        tp, got = parallel.tp, torch.zeros(3, dtype=torch.bfloat16)
        peer = 1 - tp.rank
        tp.send_receive([(torch.full((3,), tp.rank + 1.0, dtype=torch.bfloat16), peer)], [(got, peer)])
        return got

    first, second = run_ranks(ParallelLayout(tp_size=2), work)
    assert (first.tolist(), second.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_a_lost_rank_is_an_error_before_the_deadline() -> None:
    def work(parallel: Parallel) -> str:
        if parallel.tp.rank == 1:
            return "left"
        with pytest.raises(RankLostError, match="a rank is lost"):
            parallel.tp.all_gather(torch.zeros(4))
        return "told"

    assert run_ranks(ParallelLayout(tp_size=2), work, timeout_s=2.0) == ["told", "left"]


def _ends_at_rank_5(parallel: Parallel) -> bool:
    if parallel.tp.rank == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return parallel.tp.all_agree(True)


def test_fifteen_processes_learn_of_a_killed_one() -> None:
    """A broken connection is an error at once: no rank waits for the deadline."""
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 0: RankLostError: .* a rank is lost"):
        run_rank_processes(ParallelLayout(tp_size=16), _ends_at_rank_5)
    assert time.monotonic() - start < TIMEOUT_S

"""Replicas near by: fewer tokens sent, the same loads of slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.expert_location import PICKS, ExpertLocationMetadata, SplitTable
from eplb.placement import ExpertPlacement
from tests.tiers import examples

RANKS, EXPERTS, SLOTS = 4, 6, 12


@st.composite
def placements(draw: st.DrawFn) -> tuple[ExpertLocationMetadata, torch.Tensor]:
    """Draw a placement with no expert twice on a rank, and any weights."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    while True:
        more = torch.randint(EXPERTS, (SLOTS - EXPERTS,), generator=random)
        row = torch.cat([torch.arange(EXPERTS), more])[torch.randperm(SLOTS, generator=random)]
        if all(len(set(part.tolist())) == SLOTS // RANKS for part in row.view(RANKS, -1)):
            break
    weights = torch.rand(1, SLOTS, generator=random, dtype=torch.float64) ** draw(st.sampled_from((0, 1, 4)))
    return ExpertLocationMetadata(row.view(1, -1), EXPERTS), weights


def shares(table: SplitTable) -> torch.Tensor:
    """Return the share of an expert's tokens that each slot takes, [E, P]."""
    before = torch.cat([torch.zeros_like(table.ends_LRE[:, :1]), table.ends_LRE[:, :-1]], dim=1)
    found = torch.zeros(EXPERTS, SLOTS, dtype=torch.float64)
    parts = (table.ends_LRE - before).clamp(min=0).double() / PICKS
    return found.scatter_add_(1, table.slots_LRE[0].T, parts[0].T)


def near(table: SplitTable, rank: int) -> SplitTable:
    return table.nearest(rank, RANKS, SLOTS // RANKS)


@settings(max_examples=examples(80), deadline=None)
@given(placements())
def test_slots_are_loaded_as_planned_and_more_tokens_stay(drawn: tuple[ExpertLocationMetadata, torch.Tensor]) -> None:
    metadata, weights = drawn
    planned = SplitTable.of(metadata, weights)
    by_rank = torch.stack([shares(near(planned, rank)) for rank in range(RANKS)])
    assert torch.allclose(by_rank.sum(2), torch.ones(RANKS, EXPERTS, dtype=torch.float64))
    assert torch.allclose(by_rank.mean(0), shares(planned), atol=4 / PICKS)
    home = torch.arange(SLOTS) // (SLOTS // RANKS)
    stay = torch.stack([by_rank[rank][:, home == rank].sum(1) for rank in range(RANKS)])
    before = torch.stack([shares(planned)[:, home == rank].sum(1) for rank in range(RANKS)])
    assert (stay >= before - 2 / PICKS).all()
    most = torch.minimum(before * RANKS, torch.ones(()))  # all that a slot takes, or all that its rank brings
    assert torch.allclose(stay, most, atol=4 / PICKS)


@pytest.mark.mutant
def test_a_wrong_table_is_noticed() -> None:
    """A table that sends all tokens to the replica on their own rank overloads it."""
    metadata = ExpertLocationMetadata(torch.tensor([[0, 1, 2, 0, 3, 4, 0, 5, 1, 2, 3, 4]]), EXPERTS)
    weights = torch.ones(1, SLOTS, dtype=torch.float64)
    weights[0, 0] = 0.1
    planned = SplitTable.of(metadata, weights)
    greedy = shares(planned).clone()
    greedy[0] = 0
    greedy[0, 0] = 1.0
    rest = [shares(near(planned, rank)) for rank in range(1, RANKS)]
    assert not torch.allclose(torch.stack([greedy, *rest]).mean(0), shares(planned), atol=4 / PICKS)


def test_ranks_that_share_tokens_pick_alike() -> None:
    metadata = ExpertLocationMetadata(torch.tensor([[0, 1, 2, 0, 3, 4, 0, 5, 1, 2, 3, 4]]), EXPERTS)
    ids = torch.randint(EXPERTS, (50, 3), generator=torch.Generator().manual_seed(0))
    alike = [ExpertPlacement(metadata, "cpu", rank, RANKS).logical_to_physical(0, ids) for rank in range(RANKS)]
    assert all(torch.equal(alike[0], there) for there in alike)
    alone = [
        ExpertPlacement(metadata, "cpu", rank, RANKS, routes_alone=True).logical_to_physical(0, ids)
        for rank in range(RANKS)
    ]
    at_home = [(there // (SLOTS // RANKS) == rank).float().mean() for rank, there in enumerate(alone)]
    before = [(there // (SLOTS // RANKS) == rank).float().mean() for rank, there in enumerate(alike)]
    assert sum(at_home) > sum(before)
    placements_ = [ExpertPlacement(metadata, "cpu", rank, RANKS, routes_alone=True) for rank in range(RANKS)]
    assert all(torch.equal(placements_[0].split().ends_LRE, there.split().ends_LRE) for there in placements_)

"""The current map as ranks see it: local slots, the division of tokens over replicas, adopting another map."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.errors import LayoutError, MapError
from eplb.expert_location import PICKS, ExpertLocationMetadata, SplitTable, picks, trivial_location
from eplb.placement import ExpertPlacement
from tests.tiers import examples

LAYERS, EXPERTS, SLOTS, RANKS = 2, 6, 12, 4


def random_location(seed: int) -> ExpertLocationMetadata:
    """Draw experts for every rank, none twice on a rank, until each expert is on some rank."""
    generator = torch.Generator().manual_seed(seed)

    def row() -> torch.Tensor:
        while True:
            held = [torch.randperm(EXPERTS, generator=generator)[: SLOTS // RANKS] for _ in range(RANKS)]
            if len(torch.cat(held).unique()) == EXPERTS:
                return torch.cat(held)

    return ExpertLocationMetadata(torch.stack([row() for _ in range(LAYERS)]), EXPERTS)


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_ranks_share_out_all_slots(seed: int) -> None:
    metadata = random_location(seed)
    ranks = [ExpertPlacement(metadata, ep_rank=rank, ep_size=RANKS) for rank in range(RANKS)]
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            found = [rank.ep_rank * 3 + slot for rank in ranks for slot in rank.local_slots(layer, expert)]
            assert found == metadata.slots_of(layer, expert)
    assert {rank.num_local_experts for rank in ranks} == {3}


@given(st.integers(0, 2**31), st.integers(0, 500), st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_tokens_go_to_slots_of_their_expert_by_weight(seed: int, first_row: int, weighted: bool) -> None:
    metadata, generator = random_location(seed), torch.Generator().manual_seed(seed)
    weights_LP = torch.rand((LAYERS, SLOTS), generator=generator) + 0.05 if weighted else None
    placement = ExpertPlacement(trivial_location(LAYERS, EXPERTS, SLOTS), ep_size=RANKS)
    placement.adopt(metadata, weights_LP)
    rows = 4096
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            ids = torch.full((rows, 1), expert)
            slots = placement.logical_to_physical(layer, ids, first_row).flatten().tolist()
            mine = metadata.slots_of(layer, expert)
            shares = torch.ones(len(mine)) if weights_LP is None else weights_LP[layer, mine]
            counts = Counter(slots)
            assert counts.keys() <= set(mine)
            for slot, share in zip(mine, (shares / shares.sum()).tolist(), strict=True):
                assert counts[slot] / rows == pytest.approx(share, abs=4e-3)


def test_a_pick_follows_from_the_row_alone() -> None:
    placement = ExpertPlacement(random_location(3), ep_size=RANKS)
    ids = torch.randint(EXPERTS, (50, 3), generator=torch.Generator().manual_seed(0))
    whole = placement.logical_to_physical(1, ids)
    assert torch.equal(placement.logical_to_physical(1, ids[17:], first_row=17), whole[17:])
    assert not torch.equal(placement.logical_to_physical(1, ids[17:]), whole[17:]), "rows count from zero: no test"
    other = ExpertPlacement(random_location(3), ep_rank=2, ep_size=RANKS)
    assert torch.equal(other.logical_to_physical(1, ids), whole)


def test_few_rows_in_a_row_are_spread() -> None:
    for first in (0, 7, 1000):
        for count in (2, 4, 16):
            near = (picks(first, count, "cpu") >= PICKS // 2).sum().item()
            assert abs(near - count / 2) <= 1.5


def test_one_rank_reads_one_replica() -> None:
    placement = ExpertPlacement(ExpertLocationMetadata(torch.tensor([[2, 0, 1, 2]]), 3))
    ids = torch.tensor([[2, 0]]).expand(100, 2)
    assert placement.logical_to_physical(0, ids).unique(dim=0).tolist() == [[0, 1]]
    assert placement.local_slots(0, 2) == [0, 3]
    assert placement.table(0).tolist() == [1, 2, 0]


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=5))
@settings(max_examples=examples(30), deadline=None)
def test_adopting_is_as_if_made_so_and_keeps_addresses(steps: list[tuple[int, bool]]) -> None:
    placement = ExpertPlacement(trivial_location(LAYERS, EXPERTS, SLOTS), ep_rank=1, ep_size=RANKS)
    addresses = placement._split.slots_LRE.data_ptr(), placement._split.ends_LRE.data_ptr()
    located_LP = placement.metadata.physical_to_logical_map.clone()
    for number, (seed, one_layer) in enumerate(steps, start=1):
        before, new = placement.metadata, random_location(seed)
        layers = [seed % LAYERS] if one_layer else None
        placement.adopt(new, layers=layers)
        chosen = layers or list(range(LAYERS))
        located_LP[chosen] = new.physical_to_logical_map[chosen]
        fresh = ExpertPlacement(ExpertLocationMetadata(located_LP, EXPERTS), ep_rank=1, ep_size=RANKS)
        assert placement.epoch == number
        assert placement.metadata is not before
        assert torch.equal(placement.metadata.physical_to_logical_map, located_LP)
        assert torch.equal(placement._split.slots_LRE, fresh._split.slots_LRE)
        assert torch.equal(placement._split.ends_LRE, fresh._split.ends_LRE)
        assert (placement._widths, placement.is_identity) == (fresh._widths, fresh.is_identity)
    assert addresses == (placement._split.slots_LRE.data_ptr(), placement._split.ends_LRE.data_ptr())


def test_what_cannot_be_placed_is_refused_and_changes_nothing() -> None:
    with pytest.raises(LayoutError, match="7 slots cannot be divided evenly over 2 ranks"):
        ExpertPlacement(trivial_location(1, 6, 7), ep_size=2)
    twice = ExpertLocationMetadata(torch.tensor([[0, 1, 1, 2, 3, 0]]), 4)
    with pytest.raises(MapError, match="MoE layer 0: rank 0 of 2 holds expert 1 twice"):
        ExpertPlacement(twice, ep_size=2)
    assert ExpertPlacement(twice).local_slots(0, 1) == [1, 2]
    placement = ExpertPlacement(ExpertLocationMetadata(torch.tensor([[0, 1, 2, 3, 0, 1]]), 4), ep_size=2)
    good = ExpertLocationMetadata(torch.tensor([[3, 2, 1, 0, 3, 2]]), 4)
    for metadata, weights, error in (
        (twice, None, "twice"),
        (trivial_location(1, 6), None, "has 6 experts, expected 4"),
        (trivial_location(1, 4, 8), None, "shape"),
        (good, torch.ones(1, 5), "split weights have the shape"),
        (good, torch.tensor([[1.0, -1, 1, 1, 1, 1]]), "not negative"),
        (good, torch.tensor([[1.0, torch.nan, 1, 1, 1, 1]]), "finite"),
    ):
        with pytest.raises(MapError, match=error):
            placement.adopt(metadata, weights)
    assert placement.epoch == 0
    assert placement.metadata.physical_to_logical_map.tolist() == [[0, 1, 2, 3, 0, 1]]


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_slot_loads_lose_no_token(seed: int) -> None:
    metadata, generator = random_location(seed), torch.Generator().manual_seed(seed)
    table = SplitTable.of(metadata, torch.rand((LAYERS, SLOTS), generator=generator))
    counts_SLE = torch.randint(0, 1000, (3, LAYERS, EXPERTS), generator=generator, dtype=torch.int32)
    loads_SLP = table.slot_loads(counts_SLE, SLOTS)
    back = torch.zeros((3, LAYERS, EXPERTS), dtype=torch.int64)
    back.scatter_add_(2, metadata.physical_to_logical_map.expand(3, -1, -1), loads_SLP)
    assert torch.equal(back, counts_SLE.long())
    assert int(loads_SLP.min()) >= 0


def test_an_expert_without_weight_is_divided_evenly() -> None:
    metadata = ExpertLocationMetadata(torch.tensor([[0, 1, 1, 0]]), 2)
    table = SplitTable.of(metadata, torch.tensor([[0.0, 3.0, 1.0, 0.0]]))
    assert table.ends_LRE[0].tolist() == [[PICKS // 2, PICKS * 3 // 4], [PICKS, PICKS]]

"""`deepseek` and `deepseek_hierarchical` against the published example and an independent slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.algorithms.bounds import balancedness
from eplb.algorithms.deepseek import deepseek, deepseek_hierarchical
from eplb.algorithms.types import ExpertLayout
from eplb.errors import LayoutError
from tests.eplb_reference import reference_global, reference_hierarchical
from tests.tiers import examples

PUBLISHED_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
PUBLISHED_MAP = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
PUBLISHED_LAYOUT = ExpertLayout(num_logical_experts=12, num_physical_experts=16, num_ranks=8, num_nodes=2, num_groups=4)


def test_the_published_example_gives_its_published_map() -> None:
    assert deepseek_hierarchical(PUBLISHED_LOADS, PUBLISHED_LAYOUT).physical_to_logical_LP.tolist() == PUBLISHED_MAP
    # The global policy gives another map, so the example tells the policies apart.
    assert deepseek(PUBLISHED_LOADS, PUBLISHED_LAYOUT).physical_to_logical_LP.tolist() != PUBLISHED_MAP


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_same_map_as_the_slow_reference(data: st.DataObject) -> None:
    nodes = data.draw(st.sampled_from([1, 2, 3]), "nodes")
    ranks = nodes * data.draw(st.integers(1, 3), "ranks of a node")
    groups = nodes * data.draw(st.integers(1, 2), "groups of a node")
    experts = groups * data.draw(st.integers(1, 4), "experts of a group")
    least = -(-experts // ranks)
    slots = ranks * data.draw(st.integers(least, min(experts, least + 3)), "slots of a rank")
    layout = ExpertLayout(
        num_logical_experts=experts,
        num_physical_experts=slots,
        num_ranks=ranks,
        num_nodes=nodes,
        num_groups=groups,
    )
    most = data.draw(st.sampled_from([1, 5, 1000, 10**6]), "largest count")  # small ones bring many equal loads
    rows = data.draw(
        st.lists(st.lists(st.integers(0, most), min_size=experts, max_size=experts), min_size=1, max_size=3)
    )
    counts = np.array(rows)
    loads = torch.tensor(rows)
    assert deepseek(counts, layout).physical_to_logical_LP.tolist() == reference_global(loads, slots, ranks)
    hierarchical = deepseek_hierarchical(counts, layout).physical_to_logical_LP.tolist()
    assert hierarchical == reference_hierarchical(loads, slots, groups, nodes, ranks)
    doubled = deepseek(counts * 4, layout).physical_to_logical_LP
    assert np.array_equal(doubled, deepseek(counts, layout).physical_to_logical_LP)


def test_same_map_on_a_large_model() -> None:
    loads = torch.randint(0, 100_000, (2, 256), generator=torch.Generator().manual_seed(0))
    layout = ExpertLayout(num_logical_experts=256, num_physical_experts=288, num_ranks=32, num_nodes=4, num_groups=8)
    assert deepseek(loads.numpy(), layout).physical_to_logical_LP.tolist() == reference_global(loads, 288, 32)
    plan = deepseek_hierarchical(loads.numpy(), layout)
    assert plan.physical_to_logical_LP.tolist() == reference_hierarchical(loads, 288, 8, 4, 32)
    assert plan.split_LP.sum() == pytest.approx(2 * 256)
    assert (balancedness(loads.numpy(), plan) <= 1).all()


def test_equal_loads_are_where_the_published_sort_leaves_the_map_open() -> None:
    """256 experts in 288 slots on 32 ranks of one node: with a stable sort one map, with an unstable one others."""
    layout = ExpertLayout(num_logical_experts=256, num_physical_experts=288, num_ranks=32, num_nodes=1, num_groups=1)
    differing = 0
    for seed in range(42):
        loads = torch.randint(0, 1000, (1, 256), generator=torch.Generator().manual_seed(seed))
        ours = deepseek(loads.numpy(), layout).physical_to_logical_LP
        assert ours.tolist() == reference_global(loads, 288, 32)
        unstable = np.array(reference_global(loads, 288, 32, stable=False))
        differing += bool((ours != unstable).any())
        per_slot = loads.numpy()[0] / np.bincount(ours[0], minlength=256)
        # A slot that differs holds another expert of the very same load a slot.
        assert np.array_equal(per_slot[ours], per_slot[unstable])
    assert differing


def test_groups_that_do_not_divide_over_nodes() -> None:
    layout = ExpertLayout(num_logical_experts=12, num_physical_experts=16, num_ranks=8, num_nodes=8, num_groups=4)
    with pytest.raises(LayoutError, match="4 expert groups cannot be divided evenly over 8 nodes"):
        deepseek_hierarchical(PUBLISHED_LOADS, layout)

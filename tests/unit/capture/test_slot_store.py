from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from capture.routed_experts import RoutedExperts, id_dtype, missing_id
from capture.slot_store import RouteSlotStore
from tests.tiers import examples

SLOTS, LAYERS, TOP_K, EXPERTS = 12, 2, 2, 8


def rows_of(seed, count, num_experts=EXPERTS):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, LAYERS, num_experts, generator=generator).topk(TOP_K).indices


def stored(ids_TLK, num_experts=EXPERTS):
    return ids_TLK.numpy().astype(id_dtype(num_experts))


class SlotStoreMachine(RuleBasedStateMachine):
    """The store against a dictionary from slot to row."""

    store_type = RouteSlotStore

    def __init__(self):
        super().__init__()
        self.store = self.store_type(SLOTS, LAYERS, TOP_K, EXPERTS)
        self.expected = {}

    @rule(slots=st.lists(st.integers(0, SLOTS - 1), unique=True), seed=st.integers(0, 1000))
    def write(self, slots, seed):
        rows = rows_of(seed, len(slots))
        self.store.write(torch.tensor(slots, dtype=torch.int64), rows)
        self.expected.update(zip(slots, stored(rows)))

    @rule()
    def reads_what_was_written(self):
        rows = self.store.read(np.arange(SLOTS)[::-1])[::-1]
        missing = np.full((LAYERS, TOP_K), missing_id(EXPERTS), dtype=rows.dtype)
        assert np.array_equal(rows, np.stack([self.expected.get(slot, missing) for slot in range(SLOTS)]))


def test_store_behaves_like_a_dictionary():
    run_state_machine_as_test(SlotStoreMachine, settings=settings(max_examples=examples(40), deadline=None))


class KeepsTheOldRow(RouteSlotStore):
    """A wrong store: a slot that is used again keeps the row of its last owner."""

    def write(self, slots, rows_TLK):
        fresh = torch.from_numpy(~self._written[slots.numpy()])
        super().write(slots[fresh], rows_TLK[fresh])


@pytest.mark.mutant
def test_a_store_that_serves_rows_of_freed_slots_is_caught():
    class Wrong(SlotStoreMachine):
        store_type = KeepsTheOldRow

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=settings(max_examples=1000, deadline=None, database=None))


@pytest.mark.parametrize("num_experts", [16, 255, 256, 40_000, 65_535])
def test_ids_of_any_width_come_back(num_experts):
    store = RouteSlotStore(SLOTS, LAYERS, TOP_K, num_experts)
    ids = rows_of(2, 5, num_experts)
    store.write(torch.arange(5), ids)
    array = store.read(np.arange(5))
    assert array.dtype == id_dtype(num_experts)
    assert torch.equal(torch.from_numpy(array.astype("int64")), ids)


def test_what_is_written_is_copied():
    store = RouteSlotStore(SLOTS, LAYERS, TOP_K, EXPERTS)
    slots, rows = torch.arange(3), rows_of(3, 3)
    store.write(slots, rows)
    expected = stored(rows)
    slots.fill_(7), rows.zero_()  # the buffers of the next step
    assert np.array_equal(store.read(np.arange(3)), expected)


@pytest.mark.parametrize("num_experts", [EXPERTS, 300])
def test_unwritten_rows_are_missing_in_the_value_type(num_experts):
    store = RouteSlotStore(SLOTS, LAYERS, TOP_K, num_experts)
    store.write(torch.tensor([7, 3]), rows_of(1, 2, num_experts))
    array = store.read(np.array([3, 5, 7]))
    assert (array[1] == missing_id(num_experts)).all()
    assert RoutedExperts(array, num_experts, (0, 1), 2).missing_rows().tolist() == [1]


def test_23_slime_2385_rows_of_all_slots_are_a_byte_a_choice() -> None:
    slots, layers, top_k = 1000, 48, 8
    store = RouteSlotStore(slots, layers, top_k, 128)
    assert store.nbytes == slots * (layers * top_k + 1)
    assert RouteSlotStore(slots, layers, top_k, 300).nbytes == slots * (2 * layers * top_k + 1)
    assert torch.zeros(slots, layers, top_k, dtype=torch.int32).nbytes > 3 * store.nbytes  # wrong: four bytes a choice

import sys

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from capture.routed_experts import RoutedExperts, missing_id
from capture.slot_store import RouteSlotStore
from capture.storage import rows_to_numpy, storage_dtype, storage_missing

SLOTS, LAYERS, TOP_K, EXPERTS = 12, 2, 2, 8


def rows_of(seed, count, num_experts=EXPERTS):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, LAYERS, num_experts, generator=generator).topk(TOP_K).indices
    return ids.to(storage_dtype(num_experts))


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
        self.expected.update(zip(slots, rows))

    @rule(slots=st.lists(st.integers(0, SLOTS - 1)))
    def forget(self, slots):
        self.store.forget(torch.tensor(slots, dtype=torch.int64))
        for slot in slots:
            self.expected.pop(slot, None)

    @invariant()
    def reads_what_was_written(self):
        rows = self.store.read(torch.arange(SLOTS).flip(0)).flip(0)
        missing = torch.full((LAYERS, TOP_K), storage_missing(EXPERTS), dtype=rows.dtype)
        assert torch.equal(rows, torch.stack([self.expected.get(slot, missing) for slot in range(SLOTS)]))


def test_store_behaves_like_a_dictionary():
    run_state_machine_as_test(SlotStoreMachine, settings=settings(max_examples=40, deadline=None))


class ForgetfulOfForgetting(RouteSlotStore):
    """Deliberately wrong."""

    def forget(self, slots):
        pass


def test_a_store_that_serves_rows_of_freed_slots_is_caught():
    class Wrong(SlotStoreMachine):
        store_type = ForgetfulOfForgetting

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=settings(max_examples=100, deadline=None, database=None))


@pytest.mark.parametrize("num_experts", [EXPERTS, 300])
def test_unwritten_rows_are_missing_in_the_value_type(num_experts):
    store = RouteSlotStore(SLOTS, LAYERS, TOP_K, num_experts)
    store.write(torch.tensor([7, 3]), rows_of(1, 2, num_experts))
    array = rows_to_numpy(store.read(torch.tensor([3, 5, 7])), num_experts)
    assert (array[1] == missing_id(num_experts)).all()
    assert RoutedExperts(array, num_experts, (0, 1), 2).missing_rows().tolist() == [1]


def test_saved_rows_win_over_what_was_computed_later():
    store = RouteSlotStore(SLOTS, LAYERS, TOP_K, EXPERTS)
    recomputed = rows_of(1, 5)
    store.write(torch.arange(5), recomputed)
    saved = rows_of(2, 3)
    saved[1] = storage_missing(EXPERTS)
    rows = store.rows_for_request(torch.arange(5), saved)
    assert torch.equal(rows[[0, 2]], saved[[0, 2]])
    assert torch.equal(rows[[1, 3, 4]], recomputed[[1, 3, 4]])
    assert torch.equal(store.read(torch.arange(5)), recomputed)


def test_a_record_longer_than_the_pool_keeps_its_saved_rows():
    store = RouteSlotStore(SLOTS, LAYERS, TOP_K, EXPERTS)
    store.write(torch.arange(2), rows_of(1, 2))
    saved = rows_of(2, 4)
    assert torch.equal(store.rows_for_request(torch.arange(2), saved), saved)
    assert torch.equal(store.rows_for_request(torch.empty(0, dtype=torch.int64), saved), saved)
    assert torch.equal(store.rows_for_request(torch.arange(2)), rows_of(1, 2))
    assert torch.equal(store.rows_for_request(torch.arange(2), saved[:0]), rows_of(1, 2))


def test_rows_of_another_shape_are_a_bug():
    store = RouteSlotStore(SLOTS, LAYERS, TOP_K, EXPERTS)
    with pytest.raises(AssertionError):
        store.write(torch.arange(3), rows_of(1, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_committed_only_for_written_slots():
    def resident_bytes():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident_bytes()
    store = RouteSlotStore(4_000_000, 8, 8, EXPERTS)
    store.write(torch.arange(1000), torch.zeros(1000, 8, 8, dtype=torch.uint8))
    assert store.nbytes > 250_000_000
    assert resident_bytes() - before < 50_000_000
    assert np.array_equal(store.read(torch.tensor([5]))[0], np.zeros((8, 8)))

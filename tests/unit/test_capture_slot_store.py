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

    @invariant()
    def reads_what_was_written(self):
        rows = self.store.read(torch.arange(SLOTS).flip(0)).flip(0)
        missing = torch.full((LAYERS, TOP_K), storage_missing(EXPERTS), dtype=rows.dtype)
        assert torch.equal(rows, torch.stack([self.expected.get(slot, missing) for slot in range(SLOTS)]))


def test_store_behaves_like_a_dictionary():
    run_state_machine_as_test(SlotStoreMachine, settings=settings(max_examples=40, deadline=None))


class KeepsTheOldRow(RouteSlotStore):
    """Deliberately wrong: a slot that is used again keeps the row of whoever had it before."""

    def write(self, slots, rows_TLK):
        fresh = ~self._written[slots]
        super().write(slots[fresh], rows_TLK[fresh])


def test_a_store_that_serves_rows_of_freed_slots_is_caught():
    class Wrong(SlotStoreMachine):
        store_type = KeepsTheOldRow

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Wrong, settings=settings(max_examples=100, deadline=None, database=None))


@pytest.mark.parametrize("num_experts", [EXPERTS, 300])
def test_unwritten_rows_are_missing_in_the_value_type(num_experts):
    store = RouteSlotStore(SLOTS, LAYERS, TOP_K, num_experts)
    store.write(torch.tensor([7, 3]), rows_of(1, 2, num_experts))
    array = rows_to_numpy(store.read(torch.tensor([3, 5, 7])), num_experts)
    assert (array[1] == missing_id(num_experts)).all()
    assert RoutedExperts(array, num_experts, (0, 1), 2).missing_rows().tolist() == [1]

"""The radix cache and the slot accounting, as a state machine over the real classes."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from rollout.core.errors import StartupError
from rollout.memory.available import Kept, available_memory_bytes, kv_pool_tokens
from rollout.memory.kv_pool import SlotAllocator
from rollout.memory.radix_cache import NoPrefixCache, RadixCache
from rollout.memory.radix_node import RadixNode
from tests.tiers import examples

NUM_SLOTS = 40
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=10)


class RadixMachine(RuleBasedStateMachine):
    """A model that knows, per namespace, which slot holds which prefix: a hit must return exactly those slots."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(NUM_SLOTS)
        self.cache = RadixCache(self.allocator)
        self.epoch = 0
        self.content: dict[tuple, int] = {}  # (namespace, prefix) -> slot, for prefixes inserted and not yet freed

    locks = Bundle("locks")

    @rule(key=st.sampled_from([None, "a"]), tokens=TOKENS)
    def insert(self, key: str | None, tokens: list[int]) -> None:
        namespace = (key, self.epoch)
        short = len(tokens) - self.allocator.num_free
        if short > 0 and self.cache.evict(short) < short:
            return
        self._forget_freed()
        slots = self.allocator.alloc(len(tokens))
        _, known = self.cache.insert(namespace, np.array(tokens), slots)
        self.allocator.free(slots[:known])
        for i in range(known, len(tokens)):
            self.content[namespace, tuple(tokens[: i + 1])] = int(slots[i])

    @rule(target=locks, key=st.sampled_from([None, "a"]), tokens=TOKENS)
    def match_and_lock(self, key: str | None, tokens: list[int]):
        namespace = (key, self.epoch)
        node, slots = self.cache.match(namespace, np.array(tokens))
        expected = []
        for i in range(len(tokens)):
            slot = self.content.get((namespace, tuple(tokens[: i + 1])))
            if slot is None:
                break
            expected.append(slot)
        assert slots.tolist() == expected
        self.cache.lock(node)
        return node, namespace, tuple(tokens[: len(expected)])

    @rule(lock=consumes(locks))
    def unlock(self, lock) -> None:
        self.cache.unlock(lock[0])

    @rule(wanted=st.integers(1, NUM_SLOTS))
    def evict(self, wanted: int) -> None:
        evictable = self.cache.num_evictable
        freed = self.cache.evict(wanted)
        assert freed >= min(wanted, evictable)
        self._forget_freed()

    @precondition(lambda self: self.epoch < 3)
    @rule()
    def refresh(self) -> None:
        self.epoch += 1
        self.cache.retire(self.epoch)
        self._forget_freed()

    def _forget_freed(self) -> None:
        cached = set(self.cache.cached_slots().tolist())
        self.content = {key: slot for key, slot in self.content.items() if slot in cached}

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        placed = self.allocator.free_slots().tolist() + self.cache.cached_slots().tolist()
        assert sorted(placed) == list(range(NUM_SLOTS))
        assert self.cache.num_cached == self.cache.cached_slots().shape[0]
        assert 0 <= self.cache.num_locked <= self.cache.num_cached


RadixMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
test_the_radix_cache_keeps_its_invariants = RadixMachine.TestCase


def test_locked_prefix_survives_eviction_and_retirement() -> None:
    allocator = SlotAllocator(8)
    cache = RadixCache(allocator)
    node, _ = cache.insert((None, 0), np.array([1, 2, 3]), allocator.alloc(3))
    cache.insert((None, 0), np.array([4, 5]), allocator.alloc(2))
    cache.lock(node)
    cache.retire(1)
    assert (cache.num_cached, allocator.num_free) == (3, 5)
    assert cache.evict(8) == 0
    cache.unlock(node)
    assert cache.evict(8) == 3
    assert allocator.num_free == 8


def test_eviction_takes_the_least_recently_used_first() -> None:
    allocator = SlotAllocator(4)
    cache = RadixCache(allocator)
    for token in (1, 2, 3):
        cache.insert((None, 0), np.array([token]), allocator.alloc(1))
    cache.match((None, 0), np.array([1]))
    assert cache.evict(1) == 1
    assert cache.match((None, 0), np.array([2]))[1].numel() == 0
    assert cache.match((None, 0), np.array([1]))[1].numel() == 1


def test_heap_of_stale_entries_stays_bounded() -> None:
    allocator = SlotAllocator(4)
    cache = RadixCache(allocator)
    cache.insert((None, 0), np.array([1]), allocator.alloc(1))
    for _ in range(10_000):
        cache.match((None, 0), np.array([1]))
    assert len(cache._heap) <= 4 * 1024 + 1
    assert cache.evict(1) == 1


def detached() -> int:
    """Return the bytes of tokens and slots in nodes that are in no tree."""
    gc.collect()
    nodes = [x for x in gc.get_objects() if type(x) is RadixNode and x.parent is None]
    return sum(node.tokens.nbytes + node.slots.nbytes for node in nodes)


def inserted(cache: RadixCache, allocator: SlotAllocator, epoch: int, tokens: np.ndarray) -> RadixNode:
    node, known = cache.insert((None, epoch), tokens, slots := allocator.alloc(len(tokens)))
    allocator.free(slots[:known])
    return node


def test_nothing_of_dropped_prefixes_stays_in_memory_after_a_commit() -> None:
    """C6: this holds for prefixes that were matched again and again, and for prefixes that a request still used."""
    allocator = SlotAllocator(64_000)
    cache = RadixCache(allocator)
    before = detached()
    for epoch in range(1, 9):
        nodes = [inserted(cache, allocator, epoch - 1, np.arange(1000) * 7 + number) for number in range(40)]
        for number in range(40):
            cache.match((None, epoch - 1), np.arange(300 + number) * 7 + number)
        cache.lock(nodes[0])
        cache.retire(epoch)
        assert detached() == before and cache.num_cached == 1000
        cache.unlock(nodes[0])
        cache.drop_retired()
        assert detached() == before and cache.num_cached == 0
        assert len(cache._heap) == 0


def test_an_evicted_node_leaves_its_memory_while_entries_still_name_it() -> None:
    """C6: unlocking offers a leaf again; the entry that did not evict it stays."""
    allocator = SlotAllocator(4000)
    cache = RadixCache(allocator)
    before = detached()
    for number in range(20):
        node = inserted(cache, allocator, 0, np.arange(100) + 100 * number)
        cache.lock(node)
        cache.unlock(node)
    assert cache.evict(2000) == 2000
    assert detached() == before


def test_the_part_of_an_edge_that_stays_does_not_keep_the_memory_of_the_part_that_was_evicted() -> None:
    """C6: arrays of 10 tokens that are a view of 3000 take the memory of 3000."""
    allocator = SlotAllocator(4000)
    cache = RadixCache(allocator)
    inserted(cache, allocator, 0, np.arange(3000))
    node, _ = cache.match((None, 0), np.arange(10))
    cache.lock(node)
    assert cache.evict(2990) == 2990
    assert len(node) == 10 and node.tokens.base is None
    assert node.slots.untyped_storage().nbytes() == 10 * 8


def test_without_prefix_reuse_nothing_is_kept() -> None:
    allocator = SlotAllocator(4)
    cache = NoPrefixCache(allocator)
    cache.insert((None, 0), np.array([1, 2]), allocator.alloc(2))
    assert allocator.num_free == 4
    assert cache.match((None, 0), np.array([1, 2]))[1].numel() == 0


def test_namespaces_do_not_share() -> None:
    allocator = SlotAllocator(8)
    cache = RadixCache(allocator)
    cache.insert(("a", 0), np.array([1, 2]), allocator.alloc(2))
    assert cache.match((None, 0), np.array([1, 2]))[1].numel() == 0
    assert cache.match(("a", 1), np.array([1, 2]))[1].numel() == 0
    assert cache.match(("a", 0), np.array([1, 2]))[1].numel() == 2


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [("1000", "400", 600), ("max", "400", 2048 * 1024), ("999999999", "0", 2048 * 1024)],
)
def test_available_memory_is_the_smaller_of_machine_and_cgroup(
    tmp_path: Path, limit: str, usage: str, expected: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    2048 kB\n")
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text(limit + "\n")
    (cgroup / "memory.current").write_text(usage + "\n")
    assert available_memory_bytes("cpu", root=tmp_path) == expected


COMMON = {"mem_fraction": 0.5, "context_length": 10**6, "max_running_requests": 10, "weight_bytes": 3 << 20}


def test_pool_size_leaves_room_for_all_that_is_kept() -> None:
    assert kv_pool_tokens(1_000_000, 100, kept=Kept(), **COMMON) == 5000
    assert kv_pool_tokens(1_000_000, 100, kept=Kept(staging=300_000), **COMMON) == 2000
    parts = Kept(staging=100_000, activations=50_000, graphs=20_000, tables=10_000, states=20_000)
    assert kv_pool_tokens(1_000_000, 100, kept=parts, **COMMON) == 3000


def test_a_pool_that_does_not_fit_tells_all_numbers() -> None:
    kept = Kept(staging=1 << 20, activations=2 << 20, graphs=3 << 20, tables=4 << 20, states=5 << 20)
    with pytest.raises(StartupError, match="not enough memory") as refused:
        kv_pool_tokens(32 << 20, (1 << 16) + 1, kept=kept, **COMMON)
    # Weights, free, allowed, five that are kept, left, needed.
    wanted = [f"{value:.1f} MiB" for value in (3, 32, 16, 1, 2, 3, 4, 5, 1, 1)]
    found = [f"{value} MiB" for value in re.findall(r"([-0-9.]+) MiB", str(refused.value))]
    assert found == wanted


def test_a_number_of_tokens_that_is_asked_for_must_fit() -> None:
    assert kv_pool_tokens(1_000_000, 100, kept=Kept(staging=300_000), wanted=1999, **COMMON) == 1999
    with pytest.raises(StartupError, match=r"--max-total-tokens 2001 needs 0\.2 MiB"):
        kv_pool_tokens(1_000_000, 100, kept=Kept(staging=300_000), wanted=2001, **COMMON)


@given(
    available=st.integers(0, 10**9),
    parts=st.lists(st.integers(0, 10**8), min_size=5, max_size=5),
    token_bytes=st.integers(1, 10**5),
)
def test_a_pool_never_takes_what_is_kept(available: int, parts: list[int], token_bytes: int) -> None:
    kept = Kept(*parts)
    try:
        tokens = kv_pool_tokens(available, token_bytes, kept=kept, **COMMON)
    except StartupError:
        assert int(available * 0.5) - sum(parts) < 16 * token_bytes
    else:
        assert tokens >= 16 and tokens * token_bytes + sum(parts) <= available * 0.5


def test_pool_is_not_larger_than_requests_can_use() -> None:
    few = COMMON | {"context_length": 128, "max_running_requests": 4}
    assert kv_pool_tokens(10**12, 100, kept=Kept(), **few) == 512


def test_allocator_hands_out_each_slot_once() -> None:
    allocator = SlotAllocator(6)
    first, second = allocator.alloc(4), allocator.alloc(2)
    assert sorted(torch.cat([first, second]).tolist()) == list(range(6))
    with pytest.raises(AssertionError):
        allocator.alloc(1)


@pytest.mark.parametrize("kind", [RadixCache, NoPrefixCache])
def test_engine_14_a_root_lives_while_it_is_used(kind: type[RadixCache]) -> None:
    allocator = SlotAllocator(16)
    cache = kind(allocator)
    tokens = np.arange(4)
    node, _ = cache.match(("k", 0), tokens)
    cache.lock(node)
    cache.insert(("k", 0), tokens, allocator.alloc(4))
    assert cache.evict(16) == cache.num_cached == 0 or kind is RadixCache
    cache.evict(16)
    assert cache.match(("k", 0), tokens)[0] is node, "a second root would split one namespace in two"
    cache.unlock(node)
    assert not cache._roots and allocator.num_free == 16


def test_a_flush_leaves_no_nodes_for_a_search_for_cycles() -> None:
    allocator = SlotAllocator(200)
    cache = RadixCache(allocator)
    gc.collect()
    others = {id(each) for each in gc.get_objects() if type(each) is RadixNode}  # of failed tests
    for number in range(50):
        cache.insert((None, 0), np.array([number % 5, number, 7]), allocator.alloc(3))
    gc.collect()
    gc.disable()
    try:
        cache.flush()
        left = [each for each in gc.get_objects() if type(each) is RadixNode and each.parent is not None]
        assert others.issuperset(map(id, left))
    finally:
        gc.enable()

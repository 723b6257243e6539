"""The prefix tree and its snapshots against a dictionary: which row holds the recurrent state of which prefix."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import RecurrentState
from rollout.memory.kv_pool import SlotAllocator
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import RadixNode
from rollout.memory.state_pool import Keeper, SnapshotRows, num_state_rows, state_bytes_per_row

FIRST, ROWS, SLOTS = 3, 4, 96
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class Machine(RuleBasedStateMachine):
    """A model of the pool.  `content` maps a row to the namespace and the tokens of its state."""

    kind: type[SnapshotRows] = SnapshotRows

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(SLOTS)
        self.rows = self.kind(FIRST, ROWS)
        self.cache = RadixCache(self.allocator, None, self.rows)
        self.epoch = 0
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.used: dict[int, int] = {}  # when a kept row was matched or given, for the order of drops
        self.locked: list[tuple[RadixNode, bool]] = []
        self.clock = 0

    def kept(self) -> dict[int, RadixNode]:
        stack: list[RadixNode] = list(self.cache._roots.values())
        found: dict[int, RadixNode] = {}
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for row in node.states.values():
                assert row not in found, "two nodes have one row"
                found[row] = node
        return found

    def note(self, row: int) -> None:
        self.clock += 1
        self.used[row] = self.clock

    @rule(tokens=PROMPTS, interval=st.integers(1, 3), drops=st.booleans())
    def insert(self, tokens: list[int], interval: int, drops: bool) -> None:
        if self.allocator.num_free < len(tokens):
            self.cache.evict(len(tokens))
        if self.allocator.num_free < len(tokens):
            return
        taken: dict[int, int] = {}
        for length in range(interval, len(tokens) + 1, interval):
            row = self.take(drops, ())
            if row is not None:
                self.content[row] = (self.epoch, tuple(tokens[:length]))
                taken[length] = row
        slots = self.allocator.alloc(len(tokens))
        node, known = self.cache.insert((None, self.epoch), np.array(tokens), slots)
        self.allocator.free(slots[:known])
        for length in self.cache.keep_states(node, taken):
            self.rows.free(taken[length])
        kept = self.kept()
        for part in self.cache.path(node):  # the ends of a sequence go before its begin
            for row in taken.values():
                if kept.get(row) is part:
                    self.note(row)

    def take(self, drops: bool, but: Collection[int]) -> int | None:
        """Take a row, and check that the least recently used one is dropped."""
        may_go = [row for row, node in self.kept().items() if row not in but and node.pin_count == 0]
        had_free = self.rows.num_free > 0
        row = self.rows.take(drops=drops, but=but)
        if had_free:
            assert row is not None and row not in self.kept()
        elif drops and may_go:
            assert row == min(may_go, key=lambda row: self.used[row]), "not the least recently used one"
        else:
            assert row is None
        return row

    @rule(tokens=PROMPTS, drops=st.booleans())
    def match(self, tokens: list[int], drops: bool) -> None:
        kept = self.kept()
        wanted = [
            len(prefix)
            for epoch, prefix in (self.content[row] for row in kept)
            if epoch == self.epoch and prefix == tuple(tokens[: len(prefix)])
        ]
        node, slots, row = self.cache.match_state((None, self.epoch), np.array(tokens))
        assert slots.shape[0] == max(wanted, default=0)
        assert sum(map(len, self.cache.path(node))) == slots.shape[0]
        if row == -1:
            assert not wanted
            return
        assert self.content[row] == (self.epoch, tuple(tokens[: slots.shape[0]])), "the state of another prefix"
        self.note(row)
        others = []
        while (other := self.take(drops, (row,))) is not None:
            others.append(other)
        assert row not in others and row in self.kept(), "a source was dropped"
        for other in others:
            self.rows.free(other)

    @rule(tokens=PROMPTS, pins=st.booleans())
    def lock(self, tokens: list[int], pins: bool) -> None:
        node, _ = self.cache.match((None, self.epoch), np.array(tokens))
        (self.cache.pin if pins else self.cache.lock)(node)
        self.locked.append((node, pins))

    @rule(index=st.integers(0, 20))
    def unlock(self, index: int) -> None:
        if self.locked:
            node, pins = self.locked.pop(index % len(self.locked))
            (self.cache.unpin if pins else self.cache.unlock)(node)

    @rule(wanted=st.integers(1, 20))
    def evict(self, wanted: int) -> None:
        self.cache.evict(wanted)

    @rule()
    def refresh_weights(self) -> None:
        self.epoch += 1
        self.cache.retire(self.epoch)

    @rule()
    def flush(self) -> None:
        while self.locked:
            self.unlock(0)
        self.cache.flush()
        assert self.rows.num_free == ROWS

    @invariant()
    def rows_are_in_one_place(self) -> None:
        self.rows.check(())
        kept = self.kept()
        assert len(kept) == self.rows.num_kept
        for row, node in kept.items():
            offset = next(offset for offset, other in node.states.items() if other == row)
            path = self.cache.path(node)[::-1]
            tokens = [int(token) for part in path for token in part.tokens]
            prefix = tokens[: len(tokens) - len(node) + offset]
            assert 0 < offset <= len(node) and self.content[row][1] == tuple(prefix), "a state at a wrong offset"


class OffsetsStay(SnapshotRows):
    def move(self, keeper: Keeper, other: Keeper, offsets: dict[int, int]) -> None:
        super().move(keeper, other, {offset: offset for offset in offsets})


class FreedTwice(SnapshotRows):
    def free(self, row: int) -> None:
        super().free(row)
        self._free.append(row)


class DropsTheNewest(SnapshotRows):
    def take(self, *, drops: bool, but: Collection[int] = ()) -> int | None:
        self._kept = type(self._kept)(reversed(self._kept.items()))
        row = super().take(drops=drops, but=but)
        self._kept = type(self._kept)(reversed(self._kept.items()))
        return row


class DropsSources(SnapshotRows):
    def take(self, *, drops: bool, but: Collection[int] = ()) -> int | None:
        return super().take(drops=drops)


def play(kind: type[SnapshotRows]) -> None:
    machine = type("Machine", (Machine,), {"kind": kind})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=150, stateful_step_count=25, deadline=None, database=None)
    )


def test_a_match_ends_at_the_state_of_its_prefix() -> None:
    play(SnapshotRows)


@pytest.mark.parametrize("wrong", [OffsetsStay, FreedTwice, DropsTheNewest, DropsSources])
def test_wrong_rows_are_noticed(wrong: type[SnapshotRows]) -> None:
    with pytest.raises((AssertionError, KeyError, StopIteration, BaseExceptionGroup)):
        play(wrong)


def test_too_few_rows_or_too_little_memory_is_said_in_one_line() -> None:
    with pytest.raises(StartupError, match=r"^--max-state-rows 3: .* at least 4 .*$"):
        num_state_rows(3, 4, 2**20, 2**30)
    with pytest.raises(StartupError, match=r"^8 recurrent states of 1\.0 MiB do not fit into 7 MiB: .*$"):
        num_state_rows(None, 4, 2**20, 7 * 2**20)
    assert num_state_rows(None, 4, 2**20, 8 * 2**20) == 8
    assert num_state_rows(4, 4, 2**20, 4 * 2**20) == 4


def test_a_state_of_the_published_size() -> None:
    """Qwen3.5-35B-A3B: 30 layers of 32 heads of 128 x 128 in float32, and three columns of 8192 channels."""
    layer = RecurrentState(conv_size=4, conv_channels=8192, num_heads=32, key_dim=128, value_dim=128)
    row = state_bytes_per_row([layer, None] * 30, torch.bfloat16)
    assert row == 60 * 2**20 + 30 * 3 * 8192 * 2

"""Rows of recurrent states while requests come and go."""

from __future__ import annotations

from typing import Any

import torch

from rollout.core.forward_batch import StateOperands
from rollout.core.prompt import Prompt
from rollout.executor.input_builder import ExtendInput, build_forward_batch
from rollout.memory.kv_pool import ReqToTokenPool, SlotAllocator
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import NO_SLOTS
from rollout.memory.sequence import CachedSequence
from rollout.memory.state_pool import SnapshotRows
from rollout.memory.state_rows import StateRows
from rollout.scheduler.decode_batch import DecodeBatch

SPACE = (None, 0)


def no_copy(source: int, target: int) -> None:
    raise AssertionError("no draft was verified")


def sequence_in(pool_index: int) -> CachedSequence:
    sequence = CachedSequence(Prompt([0] * 100), [])
    sequence.pool_index = pool_index
    return sequence


def operands_of(states: StateRows, sequence: CachedSequence, start: int, count: int) -> StateOperands:
    """Prepare a step of `count` tokens of `sequence`."""
    item = ExtendInput([0] * count, sequence.pool_index, start, num_logits=0)
    batch = build_forward_batch([item], DecodeBatch().inputs, NO_SLOTS, ReqToTokenPool(4, 256, 0))
    states.prepare(batch, [sequence], [])
    assert batch.states is not None
    return batch.states


def kept(rows: SnapshotRows, cache: RadixCache, tokens: list[int], position: int) -> int:
    """Insert a prefix with a snapshot into the tree, and return the row of the snapshot."""
    array = torch.tensor(tokens).numpy()
    node, _ = cache.insert(SPACE, array, cache._allocator.alloc(len(tokens)))
    row = rows.take(drops=False)
    assert row is not None
    cache.keep_states(node, {position: row})
    return row


def test_a_snapshot_that_a_request_begins_from_is_not_dropped_in_that_step() -> None:
    """It is kept also when another request that would have begun from it does not fit after all."""
    rows = SnapshotRows(8, 2)
    cache = RadixCache(SlotAllocator(64), snapshots=rows)
    states = StateRows(rows, 4, no_copy, keeps_prefixes=True)
    oldest = kept(rows, cache, [1, 2, 3, 4], 4)
    other = kept(rows, cache, [5, 6, 7, 8], 4)
    rows.use(other)
    first, second = sequence_in(0), sequence_in(1)
    for sequence in (first, second):
        states.begin(sequence, oldest)
    states.end(second)
    operands = operands_of(states, first, 4, 6)
    assert operands.sources.tolist() == [oldest] and operands.rows.tolist() == [0]
    assert operands.snapshots.tolist() == [[0, 4, other]], "the other one is dropped, though used later"
    states.check()
    again = operands_of(states, first, 10, 6)
    assert again.sources.tolist() == [0], "a request goes on from its own row"
    states.check()


def test_the_rows_of_an_ended_sequence_are_free_again() -> None:
    rows: Any = SnapshotRows(8, 5)
    states = StateRows(rows, 4, no_copy, keeps_prefixes=True)
    sequence = sequence_in(0)
    states.begin(sequence, -1)
    operands = operands_of(states, sequence, 0, 16)
    assert operands.sources.tolist() == [-1]
    assert [(number, done) for number, done, _ in operands.snapshots.tolist()] == [(0, 4), (0, 8), (0, 12), (0, 16)]
    states.check()
    states.end(sequence)
    states.check()
    assert rows.num_free == 5


def test_without_a_prefix_cache_nothing_is_copied() -> None:
    states = StateRows(SnapshotRows(8, 5), 4, no_copy, keeps_prefixes=False)
    sequence = sequence_in(0)
    states.begin(sequence, -1)
    assert operands_of(states, sequence, 0, 16).snapshots.shape == (0, 3)


def verified(states: StateRows, sequence: CachedSequence, start: int, count: int) -> list[int]:
    """Prepare a step that verifies `count` drafted tokens, and return the rows of the states after 1, 2, .. tokens."""
    assert states.reserve(sequence, count) == count
    item = ExtendInput([0] * (1 + count), sequence.pool_index, start, num_logits=1 + count)
    batch = build_forward_batch([item], DecodeBatch().inputs, NO_SLOTS, ReqToTokenPool(4, 256, 0))
    states.prepare(batch, [sequence], [], 1)
    assert batch.states is not None and batch.states.rows.tolist() == [sequence.pool_index]
    snapshots = batch.states.snapshots.tolist()
    assert [entry[:2] for entry in snapshots] == [[0, after] for after in range(1, count + 1)]
    return [row for _, _, row in snapshots]


def test_a_state_goes_back_to_the_last_kept_token() -> None:
    copies: list[tuple[int, int]] = []
    rows = SnapshotRows(8, 6)
    states = StateRows(rows, 4, lambda source, target: copies.append((source, target)), keeps_prefixes=True)
    sequence = sequence_in(0)
    states.begin(sequence, -1)
    operands_of(states, sequence, 0, 17)  # snapshots at 4, 8, 12 and 16
    states.end(sequence)
    states.begin(sequence, -1)
    newest = None
    for start, count, snapshot in (
        (101, 1, None),
        (102, 3, 104),
        (105, 4, 108),
        (109, 2, None),
        (111, 1, 112),
        (112, 4, 116),
    ):
        copies.clear()
        after = verified(states, sequence, start, 3)
        states.settle(sequence, start, count)
        states.check()
        newest = snapshot or newest
        snapshots = states._of[sequence].snapshots
        assert list(snapshots) == ([] if newest is None else [newest])
        if count <= 3:
            assert copies == [(after[count - 1], 0)]
        else:  # the sequence's own row is the state after all four
            assert copies == ([(0, snapshots[116])] if snapshot == 116 else [])
    assert rows.num_free == 5, "the newest snapshot alone is kept"


def test_a_draft_is_cut_to_the_rows_that_there_are() -> None:
    rows = SnapshotRows(8, 2)
    states = StateRows(rows, 4, no_copy, keeps_prefixes=False)
    sequence = sequence_in(0)
    states.begin(sequence, -1)
    assert states.reserve(sequence, 5) == 2
    states.settle(sequence, 50, 3)  # all of it and the token that follows: its own row is right
    states.check()
    assert rows.num_free == 2

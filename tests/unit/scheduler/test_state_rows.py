"""Rows of recurrent states while requests come and go."""

from __future__ import annotations

from typing import Any, cast

import torch

from rollout.memory.kv_pool import SlotAllocator
from rollout.memory.radix_cache import RadixCache
from rollout.memory.state_pool import SnapshotRows
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.req import Extend, Req
from rollout.scheduler.state_rows import StateRows

SPACE = (None, 0)


class Request:
    """The part of a request that the rows depend on."""

    prompt_len = 100

    def __init__(self, pool_index: int) -> None:
        self.pool_index = pool_index


def request(pool_index: int) -> Req:
    return cast(Req, Request(pool_index))


def extend(req: Req, start: int, count: int) -> Extend:
    return Extend(req, start, count, completes=False)


def kept(rows: SnapshotRows, cache: RadixCache, tokens: list[int], position: int) -> int:
    """A prefix in the tree with a snapshot; its row."""
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
    states = StateRows(rows, 4, keeps_prefixes=True)
    oldest = kept(rows, cache, [1, 2, 3, 4], 4)
    other = kept(rows, cache, [5, 6, 7, 8], 4)
    rows.use(other)
    first, second = request(0), request(1)
    for req in (first, second):
        states.begin(req, oldest)
    states.end(second)
    operands = states._operands([extend(first, 4, 6)], DecodeBatch())
    assert operands.sources.tolist() == [oldest] and operands.rows.tolist() == [0]
    assert operands.snapshots.tolist() == [[0, 4, other]], "the other one is dropped, though used later"
    states.check()
    again = states._operands([extend(first, 10, 6)], DecodeBatch())
    assert again.sources.tolist() == [0], "a request goes on from its own row"
    states.check()


def test_rows_come_back() -> None:
    rows: Any = SnapshotRows(8, 5)
    states = StateRows(rows, 4, keeps_prefixes=True)
    req = request(0)
    states.begin(req, -1)
    operands = states._operands([extend(req, 0, 16)], DecodeBatch())
    assert operands.sources.tolist() == [-1]
    assert [(number, done) for number, done, _ in operands.snapshots.tolist()] == [(0, 4), (0, 8), (0, 12), (0, 16)]
    states.check()
    states.end(req)
    states.check()
    assert rows.num_free == 5


def test_without_a_prefix_cache_nothing_is_copied() -> None:
    states = StateRows(SnapshotRows(8, 5), 4, keeps_prefixes=False)
    req = request(0)
    states.begin(req, -1)
    assert states._operands([extend(req, 0, 16)], DecodeBatch()).snapshots.shape == (0, 3)

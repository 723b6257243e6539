"""`StateRows`: the recurrent states that the requests of a step read and write, and the snapshots that are taken.

    prefill of 3 .. 150, interval 64     ----------64----------128------>   copies after 64 and after 128 tokens
    decode                               ---192--->                        a copy when a multiple is reached

Snapshots lie at multiples of the interval, counted from the sequence's begin, so that they do not depend on how it was
cut into steps.  They are a request's own until its tokens go into the prefix tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rollout.core.forward_batch import StateOperands
from rollout.mem_cache.radix_cache import RadixCache, RadixNode
from rollout.mem_cache.state_pool import SnapshotRows
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.req import Extend, Req

NO_STATE = -1
_NONE = torch.empty((0, 3), dtype=torch.int64)


class StateRows:
    """`rows` has the snapshots' rows; nothing is copied where `keeps_prefixes` is False.

    The last multiple of a chunk is worth dropping the least recently used snapshot of the tree; those before it are
    taken while rows are free.  Of what a request decodes, the newest is kept.
    """

    def __init__(self, rows: SnapshotRows, interval: int, *, keeps_prefixes: bool) -> None:
        self.rows = rows
        self.interval = interval
        self._keeps_prefixes = keeps_prefixes
        self._held: set[int] = set()  # snapshots of requests
        self._sources: set[int] = set()  # snapshots that requests begin from in the step to come
        self._ones_B = torch.empty(0, dtype=torch.int64)

    def shareable(self, length: int) -> int:
        """The longest prefix of `length` tokens that can have a snapshot."""
        return length // self.interval * self.interval

    def begin(self, req: Req, row: int) -> None:
        """`req` starts from the snapshot in `row`, or from `NO_STATE`."""
        req.state_source = row
        if row != NO_STATE:
            self._sources.add(row)

    def operands(self, extends: Sequence[Extend], decodes: DecodeBatch) -> StateOperands:
        """Of the step that computes these, on the host.  Called once a step, before it is launched."""
        inputs = decodes.inputs
        if self._ones_B.shape != inputs.pool_indices.shape:
            self._ones_B = torch.ones_like(inputs.pool_indices)
        copies = self._copies(extends, decodes)
        lens, rows, sources = self._ones_B, inputs.pool_indices, inputs.pool_indices
        if extends:
            own = [item.req.pool_index for item in extends]
            begins = [item.req.state_source for item in extends]
            lens = torch.cat([torch.tensor([item.count for item in extends]), lens])
            rows = torch.cat([torch.tensor(own), rows])
            sources = torch.cat([torch.tensor(begins), sources])
            for item in extends:
                item.req.state_source = item.req.pool_index
        self._sources.clear()
        snapshots = torch.tensor(copies, dtype=torch.int64) if copies else _NONE
        return StateOperands(lens, rows, sources, snapshots)

    def hand_over(self, req: Req, cache: RadixCache, node: RadixNode, num_tokens: int) -> None:
        """The first `num_tokens` of `req` are in `cache` now, and end at `node`: it gets the snapshots of them."""
        mine = {position: row for position, row in req.snapshots.items() if position <= num_tokens}
        for position, row in mine.items():
            del req.snapshots[position]
            self._held.discard(row)
        cache.keep_states(node, mine)

    def end(self, req: Req) -> None:
        """`req` gives up its row, and the snapshots that it still has."""
        req.state_source = NO_STATE  # another request may begin from the same one: it stays in `_sources`
        for position in list(req.snapshots):
            self._drop(req, position)

    def check(self) -> None:
        """Assert that every snapshot's row is in exactly one place."""
        self.rows.check(self._held)

    def _copies(self, extends: Sequence[Extend], decodes: DecodeBatch) -> list[tuple[int, int, int]]:
        if not self._keeps_prefixes:
            return []
        copies = []
        for number, item in enumerate(extends):
            for position in self._taken(item):
                copies.append((number, position - item.start, item.req.snapshots[position]))
        reached = (decodes.inputs.seq_lens.numpy() % self.interval == 0).nonzero()[0]
        for row in reached.tolist():
            req, position = decodes.reqs[row], int(decodes.inputs.seq_lens[row])
            for old in [old for old in req.snapshots if old > req.prompt_len]:
                self._drop(req, old)
            if self._take(req, position, drops=True):
                copies.append((len(extends) + row, 1, req.snapshots[position]))
        return copies

    def _taken(self, item: Extend) -> Iterable[int]:
        """The multiples in a chunk for which there is a row, ascending.

        A prompt that ends at one is not found by itself again, as its last token is always computed: the one before is
        worth as much.
        """
        end = item.start + item.count
        positions = range(self.shareable(end), item.start, -self.interval)
        worth = 2 if self.shareable(end) == end else 1
        return sorted(p for i, p in enumerate(positions) if self._take(item.req, p, drops=i < worth))

    def _take(self, req: Req, position: int, *, drops: bool) -> bool:
        if position in req.snapshots:
            return True
        row = self.rows.take(drops=drops, but=self._sources)
        if row is not None:
            req.snapshots[position] = row
            self._held.add(row)
        return row is not None

    def _drop(self, req: Req, position: int) -> None:
        row = req.snapshots.pop(position)
        self._held.discard(row)
        self.rows.free(row)

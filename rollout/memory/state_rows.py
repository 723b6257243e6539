"""`StateRows`: the recurrent states that the requests of a step read and write, and the snapshots that are taken.

    prefill of 3 .. 150, interval 64     ----------64----------128------>   copies after 64 and after 128 tokens
    decode                               ---192--->                        a copy when a multiple is reached

Snapshots lie at multiples of the interval, counted from the start of the sequence.  So they do not depend on how it was
cut into steps.  They are a request's own until its tokens go into the prefix tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rollout.core.forward_batch import ForwardBatch, StateOperands
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import RadixNode
from rollout.memory.sequence import CachedSequence
from rollout.memory.state_pool import SnapshotRows

NO_STATE = -1
_NONE = torch.empty((0, 3), dtype=torch.int64)


@dataclass(slots=True)
class _Held:
    """The rows of a request in addition to its own: `source`, where its next step begins, and snapshots by length.

    `drafted`: rows for the states after 1, 2, .. tokens of a step that verifies a draft, until it is settled.
    """

    source: int
    snapshots: dict[int, int] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)


class StateRows:
    """The rows of all requests: `rows` has the rows for snapshots, and each of `rows.first` requests has a row.

    Without `keeps_prefixes` no snapshot is taken.  The snapshot at the last multiple of a chunk may replace the least
    recently used snapshot of the tree.  The earlier ones are taken only while rows are free.  While a request decodes,
    only its newest snapshot is kept.
    """

    def __init__(
        self, rows: SnapshotRows, interval: int, copy: Callable[[int, int], None], *, keeps_prefixes: bool
    ) -> None:
        """Take the rows for snapshots; `copy(source, target)` copies the states of a row to another one."""
        self.rows = rows
        self._copy = copy
        self.interval = interval
        self._keeps_prefixes = keeps_prefixes
        self._of: dict[CachedSequence, _Held] = {}
        self._ones_B = torch.empty(0, dtype=torch.int64)

    @property
    def num_rows(self) -> int:
        return self.rows.first + self.rows.num_rows

    @property
    def num_used(self) -> int:
        return len(self._of) + self.rows.num_rows - self.rows.num_free

    @property
    def granularity(self) -> int:
        return self.interval

    def shareable(self, length: int) -> int:
        """Return the longest prefix of `length` tokens that can have a snapshot."""
        return length // self.interval * self.interval

    def begin(self, sequence: CachedSequence, row: int) -> None:
        """Start `sequence` from the snapshot in `row`, or from `NO_STATE`."""
        self._of[sequence] = _Held(row)

    def prepare(
        self,
        batch: ForwardBatch,
        extends: Sequence[CachedSequence],
        decodes: Sequence[CachedSequence],
        num_drafts: int = 0,
    ) -> None:
        """Enter the rows of the states of the step's sequences.  Called once a step, before it is launched."""
        decoding = batch.decode.req_pool_indices_host
        if self._ones_B.shape != decoding.shape:
            self._ones_B = torch.ones_like(decoding)
        begins = [self._of[sequence].source for sequence in extends]
        prompts = len(extends) - num_drafts
        copies = self._copies(batch, extends[:prompts], decodes, begins) if self._keeps_prefixes else []
        copies = [(n if n < prompts else n + num_drafts, count, row) for n, count, row in copies]
        for number, sequence in enumerate(extends[prompts:], prompts):
            copies += [(number, count, row) for count, row in enumerate(self._of[sequence].drafted, 1)]
        lens, rows, sources = self._ones_B, decoding, decoding
        if extends:
            lens = torch.cat([torch.tensor(batch.extend_lens), lens])
            rows = torch.cat([torch.tensor(batch.extend_req_pool_indices), rows])
            sources = torch.cat([torch.tensor(begins), sources])
            for sequence in extends:
                self._of[sequence].source = sequence.pool_index
        snapshots = torch.tensor(copies, dtype=torch.int64) if copies else _NONE
        batch.states = StateOperands(lens, rows, sources, snapshots)

    def hand_over(self, sequence: CachedSequence, cache: RadixCache, node: RadixNode, num_tokens: int) -> None:
        """Give `node` the snapshots within the first `num_tokens` of `sequence`.

        These tokens are in `cache` now, and end at `node`.
        """
        snapshots = self._of[sequence].snapshots
        covered = {length: snapshots.pop(length) for length in list(snapshots) if length <= num_tokens}
        for length in cache.keep_states(node, covered):
            self.rows.free(covered[length])

    def reserve(self, sequence: CachedSequence, count: int) -> int:
        """Take rows for the states after each of the next `count` tokens; return how many there are."""
        drafted, sources = self._of[sequence].drafted, {held.source for held in self._of.values()}
        for _ in range(count):
            row = self.rows.take(drops=True, but=sources)
            if row is None:
                break
            drafted.append(row)
        return len(drafted)

    def settle(self, sequence: CachedSequence, start: int, count: int) -> None:
        """Let the state of `sequence` be the one after `count` tokens of the step that verified its draft.

        They have the positions `start ..`; the last multiple of the interval among them is its newest snapshot.
        """
        held = self._of[sequence]
        by_count = dict(enumerate(held.drafted, 1))
        held.drafted = []
        if count in by_count:
            self._copy(by_count[count], sequence.pool_index)
        newest = self.shareable(start + count)
        if self._keeps_prefixes and newest > start and newest not in held.snapshots:
            self._drop_older(sequence)
            row = by_count.pop(newest - start, None)
            if row is None:  # after all drafted tokens and the one that follows: the sequence's own row
                row = self.rows.take(drops=True, but={other.source for other in self._of.values()})
                if row is not None:
                    self._copy(sequence.pool_index, row)
            if row is not None:
                held.snapshots[newest] = row
        for row in by_count.values():
            self.rows.free(row)

    def end(self, sequence: CachedSequence) -> None:
        """Take back the row of `sequence`, and the snapshots that it still has."""
        for row in self._of.pop(sequence).snapshots.values():
            self.rows.free(row)

    def check(self) -> None:
        """Assert that every snapshot's row is in exactly one place."""
        self.rows.check([row for held in self._of.values() for row in (*held.snapshots.values(), *held.drafted)])

    def _copies(
        self,
        batch: ForwardBatch,
        extends: Sequence[CachedSequence],
        decodes: Sequence[CachedSequence],
        sources: Collection[int],
    ) -> list[tuple[int, int, int]]:
        """Return the snapshots to copy.  Rows in `sources`, from which sequences begin, are not dropped or written."""
        copies = []
        for number, sequence in enumerate(extends):
            start = batch.extend_prefix_lens[number]
            for position in self._taken(sequence, start, start + batch.extend_lens[number], sources):
                copies.append((number, position - start, self._of[sequence].snapshots[position]))
        lens_B = batch.decode.seq_lens_host
        for row in (lens_B.numpy() % self.interval == 0).nonzero()[0].tolist():
            sequence, position = decodes[row], int(lens_B[row])
            snapshots = self._of[sequence].snapshots
            self._drop_older(sequence)
            if self._take(sequence, position, sources, drops=True):
                copies.append((len(extends) + row, 1, snapshots[position]))
        return copies

    def _drop_older(self, sequence: CachedSequence) -> None:
        """Drop the snapshots behind the prompt, as a newer one follows."""
        snapshots = self._of[sequence].snapshots
        for old in [old for old in snapshots if old > sequence.prompt_len]:
            self.rows.free(snapshots.pop(old))

    def _taken(self, sequence: CachedSequence, start: int, end: int, sources: Collection[int]) -> Iterable[int]:
        """Take rows for the multiples in positions `start .. end - 1`; return, ascending, the ones that got a row.

        A prompt that ends at a multiple cannot use the snapshot there, as its last token is always computed.  So the
        snapshot before is worth as much.
        """
        positions = range(self.shareable(end), start, -self.interval)
        worth = 2 if self.shareable(end) == end else 1
        return sorted(p for i, p in enumerate(positions) if self._take(sequence, p, sources, drops=i < worth))

    def _take(self, sequence: CachedSequence, position: int, sources: Collection[int], *, drops: bool) -> bool:
        snapshots = self._of[sequence].snapshots
        if position in snapshots:
            return True
        row = self.rows.take(drops=drops, but=sources)
        if row is not None:
            snapshots[position] = row
        return row is not None

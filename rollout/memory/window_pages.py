"""`WindowPages`: the KV slots of layers with a window, for running requests and for prefix hits.

    page            0          1          2         3          of as many tokens as the window has, rounded up
    prefill    |----------|----------|-----|                   all are written in one step; the last two are kept
    decode                           |-----|----|---->         a page is given up when the next but one begins

A token sees its own page and the one before.  So a request needs only the last full page of a prefix to go on from it:
this page is the snapshot of that prefix.  A request begins from a page of the prefix tree, and reads it in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rollout.core.errors import StartupError
from rollout.core.forward_batch import ForwardBatch, WindowOperands
from rollout.core.specs.layer_specs import KVKind, WindowKV
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import RadixNode
from rollout.memory.sequence import CachedSequence
from rollout.memory.state_pool import SnapshotRows

_GRAIN = 128  # attention reads whole blocks of this many positions
_PAGES_PER_REQUEST = 3  # in addition to the pages of a step's prompt tokens: one before, and parts at both ends


@dataclass(frozen=True)
class WindowSizes:
    """`num_pages` of `page_size` tokens; `max_needed`: the most pages that requests can need in one step."""

    page_size: int
    num_pages: int
    max_needed: int

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


def window_sizes(
    layers: Sequence[KVKind | None], *, context_length: int, step_tokens: int, max_running_requests: int
) -> WindowSizes | None:
    """Return the sizes for the running requests, with one more page for the prefix tree for each request.

    `step_tokens`: the most prompt tokens of one step.  None: no window of `layers` is shorter than a context.
    """
    longest = max((layer.window for layer in layers if isinstance(layer, WindowKV)), default=0)
    page_size = -(-longest // _GRAIN) * _GRAIN
    if not 0 < page_size < context_length:
        return None
    needed = _PAGES_PER_REQUEST * max_running_requests + -(-step_tokens // page_size)
    return WindowSizes(page_size, needed + max_running_requests, needed)


def check_window_bytes(wanted: int, available: int) -> None:
    """Raise `StartupError` if the pages do not fit into memory."""
    if wanted > available:
        raise StartupError(
            f"{wanted / 2**20:.0f} MiB for the KV of layers with a window do not fit into {available / 2**20:.0f} MiB: "
            "lower --max-running-requests or --chunked-prefill-size"
        )


@dataclass(slots=True)
class _Held:
    """Rows by the page's number in the sequence.

    `own`: pages that it writes and reads.  `shared`: pages of the prefix tree that it reads.  `spare`: full pages that
    it does not read any more.  `offered`: the number of tokens offered to the tree so far.
    """

    own: dict[int, int] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)
    spare: dict[int, int] = field(default_factory=dict)
    offered: int = 0


class WindowPages:
    """The pages of all requests, and the slot table of layers with a window.

    `table` [max requests + 1, positions] int64 is that slot table; its last row is padding.  With these `sizes`, a
    request always gets the pages that it needs: the tree's pages are dropped, pinned ones last.
    """

    def __init__(
        self,
        sizes: WindowSizes,
        max_requests: int,
        max_context: int,
        device: torch.device | str,
        *,
        keeps_prefixes: bool,
    ) -> None:
        self.rows = SnapshotRows(0, sizes.num_pages)
        self.page_size = sizes.page_size
        num_pages = -(-max_context // sizes.page_size) + 1
        self.table = torch.zeros((max_requests + 1, num_pages * sizes.page_size), dtype=torch.int64, device=device)
        self.table[max_requests, 0] = sizes.num_slots
        self._offsets = torch.arange(sizes.page_size, device=device)
        self._keeps_prefixes = keeps_prefixes
        self._of: dict[CachedSequence, _Held] = {}
        self._readers: Counter[int] = Counter()  # number of requests that read each row of the tree
        self._max_spare = sizes.num_pages - sizes.max_needed
        self._num_spare = 0
        self._extended: list[tuple[CachedSequence, _Held, int]] = []  # by the last step, and their new lengths

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    @property
    def num_used(self) -> int:
        return self.rows.num_rows - self.rows.num_free

    @property
    def granularity(self) -> int:
        return self.page_size

    def shareable(self, length: int) -> int:
        """Return the longest prefix of `length` tokens that can end with a page."""
        return length // self.page_size * self.page_size

    def begin(self, sequence: CachedSequence, row: int) -> None:
        """Let `sequence`, which has a row in the slot table, go on from the page in `row`; -1: from the start."""
        held = self._of[sequence] = _Held()
        if row >= 0:
            self._read(sequence, held, sequence.cached_len // self.page_size - 1, row)

    def prepare(
        self,
        batch: ForwardBatch,
        extends: Sequence[CachedSequence],
        decodes: Sequence[CachedSequence],
        num_drafts: int = 0,
    ) -> None:
        """Give the sequences of the step the pages that it needs.  Called once a step, before it is launched."""
        size = self.page_size
        for sequence, held, end in self._extended:
            self._give_up(sequence, held, end // size - 1)
        self._extended = []
        slots = []
        first_draft = len(extends) - num_drafts
        spans = zip(extends, batch.extend_prefix_lens, batch.extend_lens, strict=True)
        for i, (sequence, start, count) in enumerate(spans):
            held, end = self._of[sequence], start + count
            if i < first_draft:
                self._extended.append((sequence, held, end))
            else:  # a draft may begin pages, of which no decode step gives up the ones before
                self._give_up(sequence, held, start // size - 1)
            for number in range(start // size, -(-end // size)):
                self._write(sequence, number)
            slots.append(self.table[sequence.pool_index, start:end])
        lens_B = batch.decode.seq_lens_host
        for row in (lens_B.numpy() % size == 1).nonzero()[0].tolist():  # whose newest token begins a page
            sequence, number = decodes[row], int(lens_B[row]) // size
            self._give_up(sequence, self._of[sequence], number - 1)
            self._write(sequence, number)
        slots.append(self.table[batch.decode.req_pool_indices, batch.positions[batch.num_extend_tokens :]])
        batch.window = WindowOperands(torch.cat(slots) if extends else slots[0], self.table)

    def reserve(self, sequence: CachedSequence, count: int) -> int:
        """Return `count`: a draft is shorter than a page, and every request may have the page that follows."""
        return count

    def settle(self, sequence: CachedSequence, start: int, count: int) -> None:
        """Do nothing: the next tokens write over the ones that a step did not keep."""

    def hand_over(self, sequence: CachedSequence, cache: RadixCache, node: RadixNode, num_tokens: int) -> None:
        """Give `node` the full pages that it lacks of the first `num_tokens` of `sequence`.

        These tokens are in `cache` now, and end at `node`.
        """
        held, size = self._of[sequence], self.page_size
        full = {(n + 1) * size: row for n, row in {**held.spare, **held.own}.items() if (n + 1) * size <= num_tokens}
        superfluous = cache.keep_states(node, full)
        for length in full.keys() - superfluous:
            number = length // size - 1
            if number in held.own:
                self._read(sequence, held, number, held.own.pop(number))
            else:
                del held.spare[number]
                self._num_spare -= 1
        held.offered = num_tokens

    def end(self, sequence: CachedSequence) -> None:
        """Take back all pages of `sequence`."""
        held = self._of.pop(sequence)
        self._num_spare -= len(held.spare)
        for row in (*held.own.values(), *held.spare.values()):
            self.rows.free(row)
        for row in held.shared.values():
            self._unread(row)
        held.own, held.spare, held.shared = {}, {}, {}

    def check(self) -> None:
        """Assert that every page is in exactly one place, and that no page is lost to its readers."""
        helds = self._of.values()
        self.rows.check([row for held in helds for row in (*held.own.values(), *held.spare.values())])
        assert Counter(row for held in helds for row in held.shared.values()) == self._readers
        assert all(self.rows.keeps(row) for row in self._readers), "a page was dropped that a request reads"
        assert self._num_spare == sum(len(held.spare) for held in helds) <= self._max_spare

    def _write(self, sequence: CachedSequence, number: int) -> None:
        own = self._of[sequence].own
        if number not in own:
            row = self.rows.take(drops=True, but=self._readers)
            if row is None:
                row = self.rows.take(drops=True, but=self._readers, even_pinned=True)
            assert row is not None, "requests need more pages than they can"
            own[number] = row
            self._enter(sequence, number, row)

    def _read(self, sequence: CachedSequence, held: _Held, number: int, row: int) -> None:
        held.shared[number] = row
        self._readers[row] += 1
        self._enter(sequence, number, row)

    def _enter(self, sequence: CachedSequence, number: int, row: int) -> None:
        size = self.page_size
        self.table[sequence.pool_index, number * size : (number + 1) * size] = self._offsets + row * size

    def _give_up(self, sequence: CachedSequence, held: _Held, first: int) -> None:
        """Give up the pages before number `first`.

        Full pages of the prompt stay for the tree, up to the maximum number of spare pages.
        """
        for number in [number for number in held.shared if number < first]:
            self._unread(held.shared.pop(number))
        for number in [number for number in held.own if number < first]:
            row, length = held.own.pop(number), (number + 1) * self.page_size
            is_wanted = self._keeps_prefixes and held.offered < length <= sequence.prompt_len
            if is_wanted and self._num_spare < self._max_spare:
                held.spare[number] = row
                self._num_spare += 1
            else:
                self.rows.free(row)

    def _unread(self, row: int) -> None:
        self._readers[row] -= 1
        if not self._readers[row]:
            del self._readers[row]

"""`CacheManager`: allocates KV slots and rows to requests, and frees them.  All of it is arithmetic on the host.

Only this module moves slots between the free list, the prefix cache and requests.  It reports whether something fits;
the policy decides which request must make room.

    position   0            cached_len        device_len
               |-- cache's ----|---- private ----|-- ahead, or none --

While the same requests decode, their slots are allocated for some steps at once: `ahead`.  Such slots still count as
available, and return to the free list when the batch changes or another request needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from rollout.core.errors import InvariantError
from rollout.core.forward_batch import ForwardBatch
from rollout.memory.kv_events import KVEvents
from rollout.memory.kv_pool import ReqToTokenPool, SlotAllocator
from rollout.memory.radix_cache import NoPrefixCache, RadixCache
from rollout.memory.radix_node import Namespace, RadixNode
from rollout.memory.sequence import CachedSequence
from rollout.memory.session_pins import SessionPins
from rollout.memory.state_pool import SnapshotRows

MAX_STEPS_AHEAD = 16


class SequenceMemory(Protocol):
    """The memory of a sequence in addition to the KV of all its tokens: `StateRows` and `WindowPages`.

    `rows` are its snapshots.  A snapshot is the part that a sequence needs to go on from a prefix.
    """

    rows: SnapshotRows

    @property
    def num_rows(self) -> int:
        """The number of rows, of requests and of snapshots."""

    @property
    def num_used(self) -> int:
        """The number of rows that a request or the prefix tree has."""

    @property
    def granularity(self) -> int:
        """The spacing of snapshots: they lie at multiples of this number of tokens."""

    def shareable(self, length: int) -> int:
        """Return the longest prefix of `length` tokens that can have a snapshot."""

    def begin(self, sequence: CachedSequence, row: int) -> None:
        """Let `sequence`, which has a row in the slot table, go on from the snapshot in `row`; -1: from the start."""

    def prepare(
        self,
        batch: ForwardBatch,
        extends: Sequence[CachedSequence],
        decodes: Sequence[CachedSequence],
        num_drafts: int = 0,
    ) -> None:
        """Add to `batch` what its layers need.  Called once a step, before it is launched.

        `extends` and `decodes`: the batch's sequences that extend and that decode, in its order.  Of `extends`, the
        last `num_drafts` verify drafts: the first token of each surely stays.
        """

    def reserve(self, sequence: CachedSequence, count: int) -> int:
        """Take what a step needs that verifies `count` drafted tokens; return for how many it suffices."""

    def settle(self, sequence: CachedSequence, start: int, count: int) -> None:
        """Note that of that step `count` tokens stay, at the positions `start ..`.  Called once for each `reserve`."""

    def hand_over(self, sequence: CachedSequence, cache: RadixCache, node: RadixNode, num_tokens: int) -> None:
        """Give `node` the snapshots within the first `num_tokens` of `sequence`.

        These tokens are in `cache` now, and end at `node`.
        """

    def end(self, sequence: CachedSequence) -> None:
        """Take back all that `sequence` has."""

    def check(self) -> None:
        """Assert that every row is in exactly one place."""


class CacheManager:
    """Owner of the free list, the prefix cache and the slot table; `free + ahead + cached + in use == total`."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_requests: int,
        max_context: int,
        device: torch.device | str,
        disable_radix_cache: bool,
        events: KVEvents | None = None,
        max_pinned_tokens: int = 0,
        pin_timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        states: SequenceMemory | None = None,
    ) -> None:
        self.allocator = SlotAllocator(num_slots)
        kind = NoPrefixCache if disable_radix_cache else RadixCache
        self.prefix_cache: RadixCache = kind(self.allocator, events, None if states is None else states.rows)
        self.states = states  # None: layers keep nothing but KV
        self.pins = SessionPins(self.prefix_cache, max_pinned_tokens, pin_timeout, clock)
        self.pool = ReqToTokenPool(max_requests, max_context + MAX_STEPS_AHEAD, num_slots, device)
        self.on_flush: Callable[[], None] = _nothing  # called once the slots are free
        self.num_private = 0  # slots held by requests and not by the cache
        self._ahead: list[torch.Tensor] = []  # [B] each; the last one is for the next step
        self._ahead_generation = -1  # of the decode batch that uses them
        self._num_ahead = 0
        self._steps_ahead = 1

    @property
    def num_available(self) -> int:
        """Slots that `extend` can hand out, evicting if it must."""
        return self.allocator.num_free + self._num_ahead + self.prefix_cache.num_evictable

    @property
    def granularity(self) -> int:
        """The divisor of all lengths of a prefix from which a request can go on."""
        return 1 if self.states is None else self.states.granularity

    def attach(self, sequence: CachedSequence, namespace: Namespace) -> None:
        """Give `sequence` a row and the longest cached prefix of `namespace`, locked."""
        assert sequence.pool_index == -1
        sequence.namespace = namespace
        tokens, row = sequence.token_array(0, sequence.matchable_len), -1
        if self.states is None:
            node, slots = self.prefix_cache.match(namespace, tokens)
        else:
            node, slots, row = self.prefix_cache.match_state(namespace, tokens)
        self.prefix_cache.lock(node)
        sequence.prefix_node = node
        sequence.pool_index = self.pool.alloc()
        sequence.cached_len = sequence.device_len = slots.shape[0]
        self.pool.enter_span(sequence.pool_index, 0, slots)
        if self.states is not None:
            self.states.begin(sequence, row)

    def shareable_len(self, sequence: CachedSequence) -> int:
        """Return how many prompt tokens `sequence` can take over from another one with the same prompt.

        Each computes the last one.
        """
        length = min(sequence.prompt_len - 1, sequence.matchable_len)
        return length if self.states is None else self.states.shareable(length)

    def extend(self, sequence: CachedSequence, count: int) -> None:
        """Take slots for the next `count` tokens of `sequence`.  The caller has checked `num_available`."""
        self.pool.enter_span(sequence.pool_index, sequence.device_len, self._alloc(count))

    def extend_each(self, generation: int, pool_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take a slot for one position of each row: `pool_indices`, `positions` and the slots returned are int64 [B],
        on the host.

        Calls of one `generation` have the same rows, and positions that grow by one from call to call.  The caller has
        checked `num_available`.
        """
        if generation != self._ahead_generation or not self._ahead:
            self._enter_ahead(generation, pool_indices, positions)
        slots = self._ahead.pop()
        count = slots.shape[0]
        self._num_ahead -= count
        self.num_private += count
        return slots

    def extend_apart(self, pool_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take a slot for each pair of a row and a position, in any number: all int64 [T], on the host.

        The caller has checked `num_available`.
        """
        self._free_ahead()
        slots = self._alloc(pool_indices.shape[0])
        self.pool.enter_each(pool_indices, positions, slots)
        return slots

    def slots_at(self, pool_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slot of each pair of a row and a position: all int64 [T], on the host."""
        return torch.from_numpy(self.pool.host_table.numpy()[pool_indices.numpy(), positions.numpy()])

    def reserve_draft(self, sequence: CachedSequence, count: int) -> int:
        """Take all but slots that verifying `count` drafted tokens needs; return for how many it suffices."""
        return count if self.states is None or not count else self.states.reserve(sequence, count)

    def settle_draft(self, sequence: CachedSequence, count: int) -> None:
        """Note that `count` tokens of the step that verified the draft of `sequence` stay.

        Called before they are counted.
        """
        if self.states is not None:
            self.states.settle(sequence, sequence.device_len, count)

    def give_back(self, slots: torch.Tensor) -> None:
        """Free slots that `extend_apart` gave, as nothing lies in them."""
        self.allocator.free(slots)
        self.num_private -= slots.shape[0]

    def slots(self, sequence: CachedSequence, start: int, end: int) -> torch.Tensor:
        """Return a view of the slots of positions `start .. end - 1`, in the host's table."""
        return torch.from_numpy(self.pool.span(sequence.pool_index, start, end))

    def share_prompt(self, sequence: CachedSequence, weight_epoch: int) -> None:
        """Insert the computed prompt of `sequence` into the prefix cache while it runs.

        If the cache meanwhile got more of this prompt from another request, nothing is inserted.  Then `sequence` keeps
        the slots that it computed, so that its rows come from its own forwards.  With snapshots it takes over the
        cache's slots instead: it began at a snapshot, perhaps before the end of the cached tokens.
        """
        namespace = sequence.namespace
        if not self.prefix_cache.keeps_prefixes or namespace is None or namespace[1] != weight_epoch:
            return
        assert sequence.prefix_node is not None
        tokens = sequence.token_array(sequence.cached_len, sequence.device_len)
        node, more = self.prefix_cache.match_below(sequence.prefix_node, tokens)
        present = more.shape[0]
        if present and self.states is None:
            return
        self._take_over(sequence, more)
        slots = self.slots(sequence, sequence.cached_len, sequence.device_len)
        node, _ = self.prefix_cache.insert_below(node, tokens[present:], slots)
        self._move_lock(sequence, node)
        if self.states is not None:
            self.states.hand_over(sequence, self.prefix_cache, node, sequence.device_len)
        self.num_private -= sequence.device_len - sequence.cached_len
        sequence.cached_len = sequence.device_len

    def detach(self, sequence: CachedSequence, weight_epoch: int, session_to_pin: str | None = None) -> None:
        """Free the row and all slots of `sequence`, and cache the KV that was computed under the current weights.

        That prefix is pinned for the session `session_to_pin`.  Raises `InvariantError` if a slot would be in two
        places afterwards.
        """
        if sequence.pool_index == -1:
            return
        assert sequence.namespace is not None and sequence.prefix_node is not None
        cached, held = sequence.cached_len, sequence.device_len
        count = superfluous = sequence.recorded_len
        if not cached <= count <= held:
            raise InvariantError(
                f"the prefix cache has {cached} tokens of a request whose record covers {count} of {held}"
            )
        if sequence.namespace[1] == weight_epoch and self.prefix_cache.keeps_prefixes:
            tokens = sequence.token_array(cached, count)
            node, known = self.prefix_cache.insert_below(
                sequence.prefix_node, tokens, self.slots(sequence, cached, count)
            )
            superfluous = cached + known
            if self.states is not None:
                self.states.hand_over(sequence, self.prefix_cache, node, count)
            if session_to_pin is not None:
                self.pins.keep(session_to_pin, node)
        if superfluous > cached:
            self.allocator.free(self.slots(sequence, cached, superfluous))
        if held > count:  # of a step that was launched before it was known to have ended
            self.allocator.free(self.slots(sequence, count, held))
        self.num_private -= held - cached
        self.prefix_cache.unlock(sequence.prefix_node)
        self.pool.free(sequence.pool_index)
        if self.states is not None:
            self.states.end(sequence)
        sequence.prefix_node = None
        sequence.pool_index = -1
        sequence.cached_len = sequence.device_len = 0
        self.require_accounted()

    def flush(self) -> None:
        """Free every slot.  The caller has checked that no request holds one."""
        assert self.num_private == 0
        self._free_ahead()
        self.pins.clear()
        self.prefix_cache.flush()
        self.require_accounted()
        self.on_flush()

    def require_accounted(self) -> None:
        """Compare the counts of the free list, the prefix cache and the requests: cheap enough to stay on.

        Raises `InvariantError`: later steps might read KV of other requests.
        """
        allocator, held, cached = self.allocator, self.num_private + self._num_ahead, self.prefix_cache.num_cached
        if allocator.num_held != held or allocator.num_cached != cached:
            counted = allocator.num_free + held + cached
            raise InvariantError(f"{counted} KV slots accounted for, {allocator.num_slots} exist")

    def check(self) -> None:
        """Assert that every slot is in exactly one place.  For tests and idle moments; costs a pass over the pool."""
        self.require_accounted()
        assert self._num_ahead == sum(slots.shape[0] for slots in self._ahead)
        placed = torch.cat([self.allocator.free_slots(), self.prefix_cache.cached_slots(), *self._ahead]).numpy()
        assert len(np.unique(placed)) == len(placed), "a KV slot is in two places"
        if self.states is not None:
            self.states.check()

    def _alloc(self, count: int) -> torch.Tensor:
        slots = self._take(count)
        self.num_private += count
        return slots

    def _take(self, count: int) -> torch.Tensor:
        if count > self.allocator.num_free:
            self._free_ahead()
        short = count - self.allocator.num_free
        if short > 0:
            self.prefix_cache.evict(short)
        return self.allocator.alloc(count)

    def _enter_ahead(self, generation: int, pool_indices: torch.Tensor, positions: torch.Tensor) -> None:
        """Take slots for the next steps: one of a new batch, then twice as many each time if that many are free."""
        self._free_ahead()
        count = pool_indices.shape[0]
        steps = 1 if generation != self._ahead_generation else min(2 * self._steps_ahead, MAX_STEPS_AHEAD)
        if steps * count > self.allocator.num_free:
            steps = 1
        slots = self._take(steps * count)
        if steps == 1:
            self.pool.enter_ahead(pool_indices, positions, slots)
            self._ahead = [slots]
        else:
            slots = slots.view(steps, count)
            self.pool.enter_ahead(pool_indices, positions + torch.arange(steps)[:, None], slots)
            self._ahead = list(slots.unbind())[::-1]
        self._ahead_generation, self._num_ahead, self._steps_ahead = generation, steps * count, steps

    def _free_ahead(self) -> None:
        for slots in self._ahead:
            self.allocator.free(slots)
        self._ahead, self._num_ahead = [], 0

    def _take_over(self, sequence: CachedSequence, slots: torch.Tensor) -> None:
        """Replace the sequence's own slots of the next tokens with the cache's `slots`, which have the same content."""
        start, end = sequence.cached_len, sequence.cached_len + slots.shape[0]
        own = self.slots(sequence, start, end).clone()
        self.pool.enter_span(sequence.pool_index, start, slots)
        self.allocator.free(own)
        self.num_private -= end - start
        sequence.cached_len = end

    def _move_lock(self, sequence: CachedSequence, node: RadixNode) -> None:
        assert sequence.prefix_node is not None
        self.prefix_cache.lock(node)
        self.prefix_cache.unlock(sequence.prefix_node)
        sequence.prefix_node = node


def _nothing() -> None:
    """Do nothing."""

"""Prefix cache: one radix tree of token ids a namespace, slots in its nodes, LRU eviction.

A namespace is `(extra_key, weight_epoch)`: prefixes written under other weights can never match.

    match()   longest cached prefix -> (node to lock, its slots)
    match_state()   match() for a model with recurrent layers: the prefix up to the last snapshot of their states
    insert()  give the tree a finished prefix; it keeps the part it lacks
    lock()    everything from a node up to its root stays until unlock()
    pin()     the same, counted separately: kept although no request uses it
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count

import numpy as np
import torch

from rollout.memory.kv_events import KVEvents
from rollout.memory.kv_pool import SlotAllocator
from rollout.memory.radix_node import (
    NO_IDS,
    NO_SLOTS,
    Namespace,
    RadixNode,
    Root,
    common_prefix,
    postorder,
    root_of,
)
from rollout.memory.state_pool import SnapshotRows


class RadixCache:
    """Owns the slots in its nodes; returns them to `allocator` on eviction."""

    keeps_prefixes = True

    def __init__(
        self,
        allocator: SlotAllocator,
        events: KVEvents | None = None,
        snapshots: SnapshotRows | None = None,
    ) -> None:
        self._allocator = allocator
        self._events = events
        self._snapshots = snapshots  # None: sequences have no recurrent state
        if snapshots is not None and events is not None:
            snapshots.on_drop = self._withdraw
        self._roots: dict[Namespace, Root] = {}
        self._retired_below = 0  # namespaces of older weight epochs are never used again
        self._clock = count(1)
        self._heap: list[tuple[int, int, RadixNode]] = []  # (last_access, tie-break, leaf); stale entries are skipped
        self._tie_break = count()
        self._heap_floor = 1024
        self.num_cached = 0
        self.num_locked = 0
        self.num_pinned = 0
        self.num_inserts = 0  # inserts that added something: while it stays, no match gets longer

    @property
    def num_evictable(self) -> int:
        return self.num_cached - self.num_locked

    def match(self, namespace: Namespace, tokens: np.ndarray) -> tuple[RadixNode, torch.Tensor]:
        """Return the node where the longest cached prefix of `tokens` [n] ends, and the prefix's slots [m <= n].

        The caller does not change them: they may be the tree's own.
        """
        return self.match_below(self._root(namespace), tokens)

    def match_below(self, node: RadixNode, tokens: np.ndarray) -> tuple[RadixNode, torch.Tensor]:
        """Match the tokens after the prefix that ends at `node`, as `match` does.  That prefix is not matched again."""
        node, slots, _ = self._descend(node, tokens)
        if len(slots) == 1:
            return node, slots[0]
        return node, torch.cat(slots) if slots else NO_SLOTS

    def _descend(self, node: RadixNode, tokens: np.ndarray) -> tuple[RadixNode, list[torch.Tensor], int]:
        """Return the node where the longest known part of `tokens` ends, its slots edge by edge, and its length."""
        slots: list[torch.Tensor] = []
        now = next(self._clock)
        for above in self.path(node):
            self._touch(above, now)
        position, count = 0, len(tokens)
        while position < count:
            child = node.children.get(int(tokens[position]))
            if child is None:
                break
            shared = common_prefix(child.tokens, tokens[position:])
            if shared < len(child.tokens):
                child = self._split(child, shared)
            self._touch(child, now)
            slots.append(child.slots)
            position += shared
            node = child
        return node, slots, position

    def match_state(self, namespace: Namespace, tokens: np.ndarray) -> tuple[RadixNode, torch.Tensor, int]:
        """Match the longest prefix with a recurrent state, as `match` does, and also return the state's row.

        Without such a prefix the row is -1.
        """
        assert self._snapshots is not None
        node, slots = self.match(namespace, tokens)
        length = slots.shape[0]
        for walker in self.path(node):
            if walker.states:
                offset = max(walker.states)
                row = walker.states[offset]
                self._snapshots.use(row)
                length -= len(walker) - offset
                return self._split(walker, offset) if offset < len(walker) else walker, slots[:length], row
            length -= len(walker)
        return self._root(namespace), NO_SLOTS, -1

    def keep_states(self, node: RadixNode, rows: Mapping[int, int]) -> set[int]:
        """Keep snapshots in the tree: `rows` maps the length of a prefix to the row of the state after it.

        The prefix that ends at `node` is at least as long as each of them.  Returns the lengths that the tree has
        already: their rows stay the caller's, the others belong to the tree from now on.
        """
        assert self._snapshots is not None
        superfluous = set()
        path = self.path(node)
        end = sum(map(len, path))
        for walker in path:
            start = end - len(walker)
            for length, row in rows.items():
                if start < length <= end and not self._snapshots.keep(row, walker, length - start):
                    superfluous.add(length)
            end = start
        if len(superfluous) < len(rows):
            self._announce(path)
        return superfluous

    def insert(self, namespace: Namespace, tokens: np.ndarray, slots: torch.Tensor) -> tuple[RadixNode, int]:
        """Give the tree `slots` [n] for `tokens` [n].

        Returns the node where `tokens` ends and how many leading tokens the tree had already.  Their slots in `slots`
        stay the caller's, the rest now belong to the tree.
        """
        return self.insert_below(self._root(namespace), tokens, slots)

    def insert_below(self, node: RadixNode, tokens: np.ndarray, slots: torch.Tensor) -> tuple[RadixNode, int]:
        """Insert the tokens after the prefix that ends at `node`, as `insert` does."""
        node, _, known = self._descend(node, tokens)
        if known < len(tokens):
            child = RadixNode(node, tokens[known:].copy(), slots[known:].clone())
            node.children[int(tokens[known])] = child
            self._allocator.keep(child.slots)
            self.num_cached += len(child.tokens)
            self.num_inserts += 1
            self._touch(child, next(self._clock))
            if self._events is not None and self._snapshots is None:
                self._events.stored(child, root_of(node).namespace, len(child))
            node = child
        return node, known

    def lock(self, node: RadixNode) -> None:
        walker: RadixNode | None = node
        while walker is not None:
            if walker.lock_count == 0:
                self.num_locked += len(walker)
            walker.lock_count += 1
            walker = walker.parent

    def unlock(self, node: RadixNode) -> None:
        walker: RadixNode | None = node
        while walker is not None:
            assert walker.lock_count > 0
            walker.lock_count -= 1
            if walker.lock_count == 0:
                self.num_locked -= len(walker)
                self._offer(walker)
            walker = walker.parent

    def pin(self, node: RadixNode) -> None:
        for walker in self.path(node):
            self.num_pinned += len(walker) if walker.pin_count == 0 else 0
            walker.pin_count += 1
        self.lock(node)

    def unpin(self, node: RadixNode) -> None:
        for walker in self.path(node):
            walker.pin_count -= 1
            self.num_pinned -= len(walker) if walker.pin_count == 0 else 0
        self.unlock(node)

    @staticmethod
    def path(node: RadixNode) -> list[RadixNode]:
        """Return the nodes of the prefix that ends at `node`, last first."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def evict(self, wanted: int) -> int:
        """Free at least `wanted` slots if that many are evictable, least recently used leaves first.

        Returns the number freed.
        """
        freed = 0
        while freed < wanted and self._heap:
            last_access, _, node = heapq.heappop(self._heap)
            if self._is_evictable(node) and node.last_access == last_access:
                freed += self._remove_leaf(node)
        return freed

    def retire(self, current_epoch: int) -> None:
        """Drop all namespaces of weight epochs before `current_epoch`.  Locked nodes are evicted once unlocked.

        A call with the epoch of the last call changes nothing and sends no event.
        """
        if current_epoch == self._retired_below:
            return
        self._retired_below = current_epoch
        if self._events is not None:
            self._events.cleared()
        self.drop_retired()

    def drop_retired(self) -> None:
        """Drop all unlocked nodes of namespaces that are never used again."""
        for root in [root for (_, epoch), root in self._roots.items() if epoch < self._retired_below]:
            for node in list(postorder(root)):
                node.block_hashes, node.num_named = NO_IDS, 0
                if self._is_evictable(node):
                    self._remove_leaf(node)
                else:
                    node.last_access = 0  # evicted first once unlocked
        self._drop_stale_entries()

    def flush(self) -> None:
        """Drop everything.  The caller has checked that nothing is locked."""
        assert self.num_locked == 0
        for root in self._roots.values():
            for node in postorder(root):
                if node.parent is not None:
                    self._allocator.free_cached(node.slots)
                    self._free_states(node)
                node.children.clear()  # else all nodes would wait for a search for cycles
        self._roots.clear()
        self._heap.clear()
        self.num_cached = 0
        if self._events is not None:
            self._events.cleared()

    def cached_slots(self) -> torch.Tensor:
        """Return all slots in the tree [num_cached], for integrity checks."""
        slots = [node.slots for root in self._roots.values() for node in postorder(root)]
        return torch.cat(slots) if slots else NO_SLOTS

    def _root(self, namespace: Namespace) -> RadixNode:
        assert namespace[1] >= self._retired_below, "a retired namespace is never matched"
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        return root

    def _split(self, child: RadixNode, length: int) -> RadixNode:
        """Cut an edge after `length` tokens:  parent -> child   becomes   parent -> upper -> child."""
        parent = child.parent
        assert parent is not None
        # Copies: a view would keep the memory of the whole edge when the other part is evicted.
        upper = RadixNode(parent, child.tokens[:length].copy(), child.slots[:length].clone())
        upper.lock_count, upper.pin_count = child.lock_count, child.pin_count
        upper.last_access = child.last_access
        upper.block_hashes = child.block_hashes[:length].copy()
        child.block_hashes = child.block_hashes[length:].copy()
        upper.num_named = int(len(child.block_hashes) > 0)
        if self._snapshots is not None:
            offsets = sorted(child.states)
            self._snapshots.move(child, upper, {offset: offset for offset in offsets if offset <= length})
            self._snapshots.move(child, child, {offset: offset - length for offset in offsets if offset > length})
        parent.children[int(upper.tokens[0])] = upper
        child.tokens, child.slots = child.tokens[length:].copy(), child.slots[length:].clone()
        child.parent = upper
        upper.children[int(child.tokens[0])] = child
        return upper

    def _touch(self, node: RadixNode, now: int) -> None:
        node.last_access = now
        if not node.children and node.lock_count == 0:
            self._offer(node)

    def _offer(self, node: RadixNode) -> None:
        """Enter an unused leaf into the eviction order, and drop an unused root: there is no bound on extra keys."""
        if isinstance(node, Root) and not node.children and node.lock_count == 0:
            self._roots.pop(node.namespace, None)
        if not self._is_evictable(node):
            return
        heapq.heappush(self._heap, (node.last_access, next(self._tie_break), node))
        if len(self._heap) > 4 * self._heap_floor:
            self._drop_stale_entries()

    def _drop_stale_entries(self) -> None:
        self._heap = [
            entry for entry in self._heap if self._is_evictable(entry[2]) and entry[2].last_access == entry[0]
        ]
        heapq.heapify(self._heap)
        self._heap_floor = max(1024, len(self._heap))

    @staticmethod
    def _is_evictable(node: RadixNode) -> bool:
        is_unused_leaf = node.lock_count == 0 and not node.children
        return is_unused_leaf and node.parent is not None and len(node.tokens) > 0

    def _remove_leaf(self, node: RadixNode) -> int:
        parent, length = node.parent, len(node)
        assert parent is not None
        del parent.children[int(node.tokens[0])]
        node.parent = None
        is_named = self._events is not None and len(node.block_hashes) > 0
        if self._events is not None and is_named:
            self._events.removed(node, 0)
        self._allocator.free_cached(node.slots)
        self._free_states(node)
        self.num_cached -= length
        node.tokens, node.slots, node.block_hashes = NO_IDS, NO_SLOTS, NO_IDS  # stale entries still name it
        if is_named and self._snapshots is not None:
            parent.num_named -= 1
            self._withdraw(parent)
        self._offer(parent)
        return length

    def _announce(self, path: list[RadixNode]) -> None:
        """Publish the tokens of `path`, last node first, up to its last snapshot."""
        below = next((place for place, node in enumerate(path) if node.states), None)
        if self._events is None or below is None:
            return
        namespace = root_of(path[-1]).namespace
        assert namespace[1] >= self._retired_below, "all of it was withdrawn"
        for place in range(len(path) - 1, below - 1, -1):
            node, known = path[place], len(path[place].block_hashes)
            end = max(node.states) if place == below else len(node)
            if end > known:
                self._events.stored(node, namespace, end)
                if known == 0 and node.parent is not None:
                    node.parent.num_named += 1

    def _withdraw(self, node: RadixNode) -> None:
        """Withdraw the tokens after the last snapshot of a path through `node`, which lost some."""
        assert self._events is not None
        while node.parent is not None and node.num_named == 0:
            end = max(node.states, default=0)
            if end >= len(node.block_hashes):
                return
            self._events.removed(node, end)
            node.block_hashes = node.block_hashes[:end].copy()
            if end > 0:
                return
            node = node.parent
            node.num_named -= 1

    def _free_states(self, node: RadixNode) -> None:
        if self._snapshots is not None:
            self._snapshots.free_of(node)


class NoPrefixCache(RadixCache):
    """The same interface without prefix reuse: nothing matches, and inserted slots are freed at once."""

    keeps_prefixes = False

    def match(self, namespace: Namespace, tokens: np.ndarray) -> tuple[RadixNode, torch.Tensor]:
        return self._root(namespace), NO_SLOTS

    def match_state(self, namespace: Namespace, tokens: np.ndarray) -> tuple[RadixNode, torch.Tensor, int]:
        return self._root(namespace), NO_SLOTS, -1

    def insert(self, namespace: Namespace, tokens: np.ndarray, slots: torch.Tensor) -> tuple[RadixNode, int]:
        self._allocator.free(slots)
        return self._root(namespace), 0

"""Plans what must be copied where so that slots match a new map: arithmetic, the same on every rank.

    slots        rank 0   rank 1   rank 2            moves of this layer
    before       A B      C D      A C               B: rank 0, slot 0 <- 1     on the rank itself
    after        B A      A D      A C               A: rank 0, slot 1 <- 0     a cycle: why content is staged first
                                                     A: rank 1, slot 2 <- rank 0 or 2, slot 0 or 4

A rank gets an expert that is new to it once, however many of its slots want it; from a rank on its own node if one
has it, and among those from the one that sends least.  Every changed slot is the target of exactly one move.

Layers are taken in chunks, one after the other, each small enough for a budget; a layer is never divided, so after
every chunk the map is complete.

Shapes: L MoE layers, P physical experts (slots over all ranks), G ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from eplb.algorithms.types import ExpertLayout, checked_map
from eplb.errors import EplbRequestError


@dataclass(frozen=True, slots=True)
class Move:
    """`logical_expert` of MoE layer `layer` from one slot of a rank into all slots of another, or the same, that want
    it.  Slots are physical ids.
    """

    layer: int
    logical_expert: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slots: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        return self.source_rank == self.target_rank


@dataclass(frozen=True)
class RankWork:
    """The work of one rank in a chunk, all in the chunk's order: so two ranks agree on the order of their exchanges.

    Every local move and every receive takes a spare slot, in the order `local`, then `receives`.
    """

    local: tuple[Move, ...] = ()
    sends: tuple[Move, ...] = ()
    receives: tuple[Move, ...] = ()

    @property
    def staged(self) -> tuple[Move, ...]:
        return self.local + self.receives

    @property
    def num_changed_slots(self) -> int:
        return sum(len(move.target_slots) for move in self.staged)

    @property
    def num_handled(self) -> int:
        """Experts that this rank copies, sends or receives: what its part of a chunk takes time for."""
        return len(self.local) + len(self.sends) + len(self.receives)


@dataclass(frozen=True)
class MigrationChunk:
    """Consecutive MoE layers and their moves; layers without moves are in it too: their splits may be new."""

    layers: range
    moves: tuple[Move, ...]

    @cached_property
    def _by_rank(self) -> dict[int, RankWork]:
        local: dict[int, list[Move]] = {}
        sends: dict[int, list[Move]] = {}
        receives: dict[int, list[Move]] = {}
        for move in self.moves:
            if move.is_local:
                local.setdefault(move.target_rank, []).append(move)
            else:
                sends.setdefault(move.source_rank, []).append(move)
                receives.setdefault(move.target_rank, []).append(move)
        return {
            rank: RankWork(*(tuple(moves.get(rank, ())) for moves in (local, sends, receives)))
            for rank in {*local, *sends, *receives}
        }

    def work_of(self, rank: int) -> RankWork:
        return self._by_rank.get(rank, RankWork())

    @property
    def num_handled_by_busiest(self) -> int:
        return max((work.num_handled for work in self._by_rank.values()), default=0)


@dataclass(frozen=True)
class Migration:
    """From one map to another.  `slot_bytes`: of one expert slot of one layer on one rank."""

    layout: ExpertLayout
    slot_bytes: int
    before_LP: np.ndarray
    after_LP: np.ndarray
    chunks: tuple[MigrationChunk, ...]

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        return tuple(move for chunk in self.chunks for move in chunk.moves)

    @cached_property
    def num_received(self) -> int:
        """Experts that go from one rank to another, each rank's and each layer's counted."""
        return sum(not move.is_local for move in self.moves)

    @property
    def num_local_copies(self) -> int:
        return len(self.moves) - self.num_received

    @property
    def num_bytes(self) -> int:
        """The bytes that go between ranks."""
        return self.num_received * self.slot_bytes

    @property
    def num_changed_slots(self) -> int:
        return int((self.before_LP != self.after_LP).sum())

    def handled_bytes(self, chunk: MigrationChunk) -> int:
        """Return the bytes sent, received or copied in a chunk by its busiest rank, which the chunk's time follows."""
        return chunk.num_handled_by_busiest * self.slot_bytes

    def digest(self) -> str:
        """Return a digest: two ranks with the same one make the same moves in the same order."""
        content = hashlib.sha256(repr((self.layout, self.slot_bytes)).encode())
        for table in (self.before_LP, self.after_LP):
            content.update(np.ascontiguousarray(table, dtype="<i8").tobytes())
        for chunk in self.chunks:
            content.update(repr((chunk.layers, chunk.moves)).encode())
        return content.hexdigest()


def plan_migration(
    before_LP: np.ndarray | torch.Tensor,
    after_LP: np.ndarray | torch.Tensor,
    layout: ExpertLayout,
    slot_bytes: int,
    *,
    layers_per_chunk: int | None = None,
    max_handled_bytes: int | None = None,
) -> Migration:
    """Return the moves from the map `before_LP` [L, P] to `after_LP` [L, P], in chunks of layers.

    A chunk has at most `layers_per_chunk` layers, and its busiest rank handles at most `max_handled_bytes` unless one
    layer alone is more; without either there is one chunk.  Raises `MapError` for a map that cannot be served from,
    `EplbRequestError` for sizes below 1.
    """
    limits = (("slot_bytes", slot_bytes), ("layers_per_chunk", layers_per_chunk), ("budget", max_handled_bytes))
    for name, value in limits:
        if value is not None and value < 1:
            raise EplbRequestError(f"{name} must be at least 1, got {value}")
    num_layers = len(before_LP)
    before = checked_map(before_LP, layout, num_layers, duplicates=True)
    after = checked_map(after_LP, layout, num_layers, duplicates=True)
    sent_G = [0] * layout.num_ranks
    by_layer = [_moves_of_layer(layer, before[layer], after[layer], layout, sent_G) for layer in range(num_layers)]
    max_handled = None if max_handled_bytes is None else max(1, max_handled_bytes // slot_bytes)
    chunks = _in_chunks(by_layer, layers_per_chunk, max_handled)
    return Migration(layout, slot_bytes, before, after, tuple(chunks))


def _moves_of_layer(
    layer: int, before_P: np.ndarray, after_P: np.ndarray, layout: ExpertLayout, sent_G: list[int]
) -> list[Move]:
    """Return the moves of one layer.  `sent_G` counts what every rank has to send so far, over all layers."""
    changed = np.nonzero(before_P != after_P)[0].tolist()
    if not changed:
        return []
    held = _first_slots(before_P, layout)
    wanted: dict[tuple[int, int], list[int]] = {}
    for slot in changed:
        wanted.setdefault((int(after_P[slot]), slot // layout.slots_per_rank), []).append(slot)
    moves, remote = [], []
    for (expert, rank), slots in wanted.items():
        if rank in held[expert]:
            moves.append(Move(layer, expert, rank, held[expert][rank], rank, tuple(slots)))
        else:
            remote.append((expert, rank, slots, _near(held[expert], rank, layout)))
    here_G = [0] * layout.num_ranks
    # Those with the least choice first: the others can go around them.
    for expert, rank, slots, holders in sorted(remote, key=lambda item: (len(item[3]), item[0], item[1])):
        source = min(holders, key=lambda holder: (here_G[holder], sent_G[holder], holder))
        here_G[source] += 1
        sent_G[source] += 1
        moves.append(Move(layer, expert, source, held[expert][source], rank, tuple(slots)))
    return moves


def _first_slots(before_P: np.ndarray, layout: ExpertLayout) -> dict[int, dict[int, int]]:
    """Return expert -> rank that holds it -> its first slot there."""
    held: dict[int, dict[int, int]] = {}
    for slot, expert in enumerate(before_P.tolist()):
        held.setdefault(expert, {}).setdefault(slot // layout.slots_per_rank, slot)
    return held


def _near(holders: dict[int, int], rank: int, layout: ExpertLayout) -> list[int]:
    """Return the holders on the node of `rank`, or all where there is none."""
    ranks_per_node = layout.num_ranks // layout.num_nodes
    near = [holder for holder in holders if holder // ranks_per_node == rank // ranks_per_node]
    return near or list(holders)


def _in_chunks(
    by_layer: Sequence[list[Move]], layers_per_chunk: int | None, max_handled: int | None
) -> list[MigrationChunk]:
    chunks: list[MigrationChunk] = []
    start, moves, handled_by_rank = 0, list[Move](), Counter[int]()
    for layer, more in enumerate(by_layer):
        of_layer = Counter(rank for move in more for rank in {move.source_rank, move.target_rank})
        is_full = layer - start == layers_per_chunk
        is_over = bool(moves and more) and max_handled is not None and _most(handled_by_rank + of_layer) > max_handled
        if is_full or is_over:
            chunks.append(MigrationChunk(range(start, layer), tuple(moves)))
            start, moves, handled_by_rank = layer, [], Counter()
        moves += more
        handled_by_rank += of_layer
    return [*chunks, MigrationChunk(range(start, len(by_layer)), tuple(moves))]


def _most(handled_by_rank: Counter[int]) -> int:
    return max(handled_by_rank.values(), default=0)

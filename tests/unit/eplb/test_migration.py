"""Moves from one expert map to another: on symbols they give the new map, and an independent count agrees.

Shapes: L MoE layers, P physical experts (slots), G ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eplb_loads import drift, zipf
from eplb.algorithms.bounds import cross_rank_copies
from eplb.algorithms.registry import make_plan
from eplb.algorithms.types import ExpertLayout
from eplb.errors import EplbRequestError, MapError
from eplb.migration import Migration, MigrationChunk, Move, plan_migration
from tests.tiers import examples

SLOT_BYTES = 1000


def sent_by_rank(migration: Migration) -> list[int]:
    """Return the bytes that each rank sends."""
    return bytes_by_rank(migration, [move.source_rank for move in migration.moves if not move.is_local])


def received_by_rank(migration: Migration) -> list[int]:
    """Return the bytes that each rank receives."""
    return bytes_by_rank(migration, [move.target_rank for move in migration.moves if not move.is_local])


def bytes_by_rank(migration: Migration, ranks: list[int]) -> list[int]:
    counts = np.bincount(np.asarray(ranks, dtype=np.int64), minlength=migration.layout.num_ranks)
    return [int(count) * migration.slot_bytes for count in counts]


def random_map(layout: ExpertLayout, num_layers: int, seed: int, duplicates: bool = False) -> np.ndarray:
    """Draw a map of every expert, int64 [L, P]; only with `duplicates` may a rank hold an expert twice."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(num_layers):
        while True:
            row = np.concatenate(
                (
                    np.arange(layout.num_logical_experts),
                    generator.integers(layout.num_logical_experts, size=layout.num_redundant_experts),
                )
            )
            generator.shuffle(row)
            by_rank = row.reshape(layout.num_ranks, -1)
            if duplicates or all(len(set(held)) == len(held) for held in by_rank.tolist()):
                break
        rows.append(row)
    return np.stack(rows)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertLayout, np.ndarray, np.ndarray]:
    """Draw a layout, and maps before and after of one to four layers, which are often nearly the same."""
    nodes, per_node, slots = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(2, 5))
    ranks = nodes * per_node
    experts = draw(st.integers(max(slots, ranks * slots // 2), ranks * slots))
    layout = ExpertLayout(
        num_logical_experts=experts, num_physical_experts=ranks * slots, num_ranks=ranks, num_nodes=nodes
    )
    layers, seed = draw(st.integers(1, 4)), draw(st.integers(0, 2**31))
    before = random_map(layout, layers, seed, duplicates=draw(st.booleans()))
    kind = draw(st.sampled_from(["fresh", "shuffled on ranks", "one layer", "same"]))
    after = random_map(layout, layers, seed + 1, duplicates=draw(st.booleans()))
    if kind == "shuffled on ranks":
        generator = np.random.default_rng(seed)
        after = generator.permuted(before.reshape(-1, slots), axis=1).reshape(before.shape)
    elif kind == "one layer":
        after[1:] = before[1:]
    elif kind == "same":
        after = before.copy()
    return layout, before, after


def between(before: list[int], after: list[int], layout: ExpertLayout) -> Migration:
    """Plan the migration of one layer."""
    return plan_migration(np.array([before]), np.array([after]), layout, SLOT_BYTES)


def staged(slots_LP: np.ndarray, chunk: MigrationChunk) -> None:
    """Execute a chunk on symbols: everything is read before anything is written."""
    content = [slots_LP[move.layer, move.source_slot] for move in chunk.moves]
    for move, symbol in zip(chunk.moves, content, strict=True):
        slots_LP[move.layer, list(move.target_slots)] = symbol


def one_by_one(slots_LP: np.ndarray, chunk: MigrationChunk) -> None:
    """Execute moves without staging (wrong): a cycle or a source that is overwritten first gives wrong content."""
    for move in chunk.moves:
        slots_LP[move.layer, list(move.target_slots)] = slots_LP[move.layer, move.source_slot]


def check(migration: Migration, execute: Callable[[np.ndarray, MigrationChunk], None] = staged) -> None:
    """Check everything that a migration promises, with independent code."""
    layout, before, after = migration.layout, migration.before_LP, migration.after_LP
    slots = before.copy()
    covered: list[int] = []
    for chunk in migration.chunks:
        assert all(move.layer in chunk.layers for move in chunk.moves)
        covered += chunk.layers
        execute(slots, chunk)
        done = chunk.layers.stop
        assert np.array_equal(slots, np.concatenate((after[:done], before[done:]))), "a map between chunks"
    assert covered == list(range(len(before))), "layers in order, each in one chunk"
    targets = Counter((move.layer, slot) for move in migration.moves for slot in move.target_slots)
    assert set(targets) == {(int(layer), int(slot)) for layer, slot in np.argwhere(before != after)}
    assert set(targets.values()) <= {1}, "a slot is written once"
    received = Counter((m.layer, m.logical_expert, m.target_rank) for m in migration.moves if not m.is_local)
    assert set(received.values()) <= {1}, "nothing is received twice"
    for move in migration.moves:
        assert before[move.layer, move.source_slot] == move.logical_expert
        assert move.source_slot // layout.slots_per_rank == move.source_rank
        assert {slot // layout.slots_per_rank for slot in move.target_slots} == {move.target_rank}
        assert move.source_rank in nearest(before[move.layer], move, layout), "not the nearest holder"
    expected = cross_rank_copies(before, after, layout)
    assert migration.num_bytes == expected.sum() * migration.slot_bytes
    assert received_by_rank(migration) == (expected.sum(axis=0) * migration.slot_bytes).tolist()
    assert sum(sent_by_rank(migration)) == migration.num_bytes
    check_rank_views(migration)


def nearest(before_P: np.ndarray, move: Move, layout: ExpertLayout) -> set[int]:
    """Return the ranks from which the move may come.

    The target itself if it holds the expert, else the holders in its node, else all holders.
    """
    holders = {int(slot) // layout.slots_per_rank for slot in np.nonzero(before_P == move.logical_expert)[0]}
    per_node = layout.num_ranks // layout.num_nodes
    neighbours = {rank for rank in holders if rank // per_node == move.target_rank // per_node}
    return holders & {move.target_rank} or neighbours or holders


def check_rank_views(migration: Migration) -> None:
    """Check that ranks see the moves of a chunk, in its order, so that both ends of every pair agree."""
    ranks = range(migration.layout.num_ranks)
    for chunk in migration.chunks:
        work = [chunk.work_of(rank) for rank in ranks]
        assert sum(len(w.local) + len(w.sends) for w in work) == len(chunk.moves)
        assert sum(w.num_changed_slots for w in work) == sum(len(move.target_slots) for move in chunk.moves)
        assert max(w.num_handled for w in work) == chunk.num_handled_by_busiest
        for a in ranks:
            for b in ranks:
                sent = [move for move in work[a].sends if move.target_rank == b]
                assert sent == [move for move in work[b].receives if move.source_rank == a]


@settings(max_examples=examples(150), deadline=None)
@given(cases(), st.sampled_from([None, 1, 2]), st.sampled_from([None, 1, 3]))
def test_the_moves_give_the_new_map(
    case: tuple[ExpertLayout, np.ndarray, np.ndarray], layers_per_chunk: int | None, max_handled: int | None
) -> None:
    layout, before, after = case
    budget = None if max_handled is None else max_handled * SLOT_BYTES
    migration = plan_migration(
        before, after, layout, SLOT_BYTES, layers_per_chunk=layers_per_chunk, max_handled_bytes=budget
    )
    check(migration)
    again = plan_migration(
        before.copy(), after.copy(), layout, SLOT_BYTES, layers_per_chunk=layers_per_chunk, max_handled_bytes=budget
    )
    assert again.moves == migration.moves and again.digest() == migration.digest()
    for chunk in migration.chunks:
        assert layers_per_chunk is None or len(chunk.layers) <= layers_per_chunk
        layers_with_moves = {move.layer for move in chunk.moves}
        if budget is not None and migration.handled_bytes(chunk) > budget:
            assert len(layers_with_moves) == 1, "only a single layer may be over the budget"
    if layers_per_chunk is None and budget is None:
        assert len(migration.chunks) == 1


EXAMPLE = ExpertLayout(num_logical_experts=4, num_physical_experts=6, num_ranks=3)
EXAMPLE_BEFORE = np.array([[0, 1, 2, 3, 0, 2]])
EXAMPLE_AFTER = np.array([[1, 0, 0, 3, 0, 2]])


def test_the_example_takes_one_transfer_and_two_local_copies() -> None:
    migration = plan_migration(EXAMPLE_BEFORE, EXAMPLE_AFTER, EXAMPLE, SLOT_BYTES)
    assert migration.moves == (Move(0, 1, 0, 1, 0, (0,)), Move(0, 0, 0, 0, 0, (1,)), Move(0, 0, 0, 0, 1, (2,)))
    assert (migration.num_received, migration.num_local_copies, migration.num_bytes) == (1, 2, SLOT_BYTES)
    assert sent_by_rank(migration) == [SLOT_BYTES, 0, 0] and received_by_rank(migration) == [0, SLOT_BYTES, 0]
    assert migration.handled_bytes(migration.chunks[0]) == 3 * SLOT_BYTES


def test_an_expert_is_received_once_for_several_slots() -> None:
    layout = ExpertLayout(num_logical_experts=4, num_physical_experts=8, num_ranks=2)
    migration = between([0, 1, 2, 0, 3, 1, 2, 3], [0, 1, 2, 1, 3, 0, 0, 2], layout)
    check(migration)
    assert [(m.target_rank, m.target_slots) for m in migration.moves if not m.is_local] == [(1, (5, 6))]


def test_sends_are_spread_over_the_holders() -> None:
    """Ranks 4..7 all need the experts 0..3 of ranks 0..3, and no rank sends more than its part."""
    ranks, slots = 8, 8
    layout = ExpertLayout(num_logical_experts=36, num_physical_experts=ranks * slots, num_ranks=ranks)
    shared, own = [0, 1, 2, 3], [list(range(first, first + 4)) for first in range(4, 36, 4)]
    filled = [own[4 + (rank + 1) % 4] for rank in range(4)]  # with what another rank has as well
    before = np.concatenate([*([*shared, *own[r]] for r in range(4)), *([*filled[r], *own[4 + r]] for r in range(4))])
    after = np.concatenate([[*shared, *own[r]] for r in range(8)])
    migration = between(before.tolist(), after.tolist(), layout)
    check(migration)
    assert migration.num_received == 16
    assert sent_by_rank(migration) == [4 * SLOT_BYTES] * 4 + [0] * 4


def test_another_node_is_asked_only_where_no_rank_of_the_own_has_the_expert() -> None:
    layout = ExpertLayout(num_logical_experts=4, num_physical_experts=8, num_ranks=4, num_nodes=2)
    before = [0, 1, 2, 3, 0, 2, 1, 2]
    after = [0, 1, 2, 3, 0, 2, 0, 3]
    moves = between(before, after, layout).moves
    assert {(m.logical_expert, m.source_rank, m.target_rank) for m in moves} == {(0, 2, 3), (3, 1, 3)}


def test_a_real_plan_of_a_large_model() -> None:
    layout = ExpertLayout(num_logical_experts=128, num_physical_experts=160, num_ranks=16, num_nodes=2)
    counts = zipf(6, 128, 1.0)
    before = make_plan("balanced", counts, layout).physical_to_logical_LP
    after = make_plan("balanced", drift(counts, 0.3), layout).physical_to_logical_LP
    migration = plan_migration(before, after, layout, SLOT_BYTES, max_handled_bytes=60 * SLOT_BYTES)
    check(migration)
    sent = np.array(sent_by_rank(migration)) / SLOT_BYTES
    assert sent.max() <= 1.35 * sent.mean()
    always_first = Counter(
        min(nearest(before[move.layer], move, layout)) for move in migration.moves if not move.is_local
    )
    assert max(always_first.values()) > sent.max(), "what spreading is for"


# --- the check sees mistakes ------------------------------------------------------------------------------------------


def altered(migration: Migration, change: Callable[[list[Move]], object]) -> Migration:
    (chunk,) = migration.chunks
    moves = list(chunk.moves)
    change(moves)
    return replace(migration, chunks=(MigrationChunk(chunk.layers, tuple(moves)),))


WRONG: dict[str, Callable[[list[Move]], object]] = {
    "a move is missing": lambda moves: moves.pop(),
    "received twice": lambda moves: moves.append(moves[-1]),
    "another source slot": lambda moves: moves.append(replace(moves.pop(), source_slot=5)),
    "source of the new map": lambda moves: moves.append(replace(moves.pop(), source_slot=1)),
    "another rank's slot": lambda moves: moves.append(replace(moves.pop(), target_slots=(4,))),
    "one slot too many": lambda moves: moves.append(replace(moves.pop(), target_slots=(2, 3))),
    "from far although it is near": lambda moves: moves.__setitem__(1, replace(moves[1], source_rank=2, source_slot=4)),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_seen(name: str) -> None:
    migration = plan_migration(EXAMPLE_BEFORE, EXAMPLE_AFTER, EXAMPLE, SLOT_BYTES)
    check(migration)
    with pytest.raises(AssertionError):
        check(altered(migration, WRONG[name]))


def test_copying_without_staging_is_seen() -> None:
    with pytest.raises(AssertionError, match="a map between chunks"):
        check(plan_migration(EXAMPLE_BEFORE, EXAMPLE_AFTER, EXAMPLE, SLOT_BYTES), one_by_one)


def test_digests_of_different_plans_differ() -> None:
    plans = [
        plan_migration(EXAMPLE_BEFORE, EXAMPLE_AFTER, EXAMPLE, SLOT_BYTES),
        plan_migration(EXAMPLE_BEFORE, EXAMPLE_AFTER, EXAMPLE, SLOT_BYTES + 1),
        plan_migration(EXAMPLE_AFTER, EXAMPLE_BEFORE, EXAMPLE, SLOT_BYTES),
        plan_migration(np.tile(EXAMPLE_BEFORE, (2, 1)), np.tile(EXAMPLE_AFTER, (2, 1)), EXAMPLE, SLOT_BYTES),
        plan_migration(
            np.tile(EXAMPLE_BEFORE, (2, 1)),
            np.tile(EXAMPLE_AFTER, (2, 1)),
            EXAMPLE,
            SLOT_BYTES,
            layers_per_chunk=1,
        ),
    ]
    plans.append(altered(plans[0], lambda moves: moves.reverse()))
    assert len({plan.digest() for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"layers_per_chunk": 0}, EplbRequestError, "layers_per_chunk must be at least 1"),
        ({"max_handled_bytes": 0}, EplbRequestError, "budget must be at least 1"),
        ({"slot_bytes": 0}, EplbRequestError, "slot_bytes must be at least 1"),
        ({"after_LP": np.array([[1, 1, 0, 3, 0, 1]])}, MapError, "no slot holds expert 2"),
        ({"after_LP": np.array([[1, 0, 0, 4, 0, 2]])}, MapError, "slot 3 holds expert 4"),
        ({"after_LP": np.tile(EXAMPLE_AFTER, (2, 1))}, MapError, "the map has the shape"),
    ],
)
def test_bad_input_is_refused(settings: dict, error: type[Exception], message: str) -> None:
    given = {"before_LP": EXAMPLE_BEFORE, "after_LP": EXAMPLE_AFTER, "layout": EXAMPLE, "slot_bytes": 1} | settings
    with pytest.raises(error, match=message):
        plan_migration(**given)

"""Experts move between real ranks, and one rank fails at any point: all ranks end with one map.

Then every slot holds the expert that the map names, or all ranks raise an error which states that it may not.

Shapes: L MoE layers, P physical experts (slots over all ranks).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from eplb.algorithms.types import ExpertLayout
from eplb.errors import EplbError, RebalanceRefused, TornTransferError, TransferError
from eplb.migration import Migration, plan_migration
from eplb.transfer import Content, ExpertTransfer, RankGroup, _ChunkOnRank, _signed
from rollout.distributed.communicator import RankLostError
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from tests.expert_memory import SLOT_BYTES, Fault, Moved, PlantedError, move_experts
from tests.ranks import run_ranks

LAYERS, SLOTS = 3, 4


def two_ranks() -> Migration:
    """Plan local cycles, an exchange between ranks, one expert received for two slots, and a layer that stays."""
    layout = ExpertLayout(num_logical_experts=6, num_physical_experts=8, num_ranks=2)
    before = np.array([[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 0, 3, 4, 5, 3]])
    after = np.array([[1, 4, 2, 3, 4, 5, 0, 2], [0, 1, 2, 3, 4, 5, 0, 1], [3, 0, 1, 4, 2, 2, 4, 5]])
    return plan_migration(before, after, layout, SLOT_BYTES, layers_per_chunk=1)


def four_ranks() -> Migration:
    layout = ExpertLayout(num_logical_experts=12, num_physical_experts=16, num_ranks=4, num_nodes=2)
    generator = np.random.default_rng(5)
    rows = [generator.permutation([*range(12), *generator.choice(12, 4, replace=False)]) for _ in range(2 * LAYERS)]
    return plan_migration(np.stack(rows[:LAYERS]), np.stack(rows[LAYERS:]), layout, SLOT_BYTES, layers_per_chunk=2)


PLANS = {2: two_ranks(), 4: four_ranks()}


def on_ranks(
    migration: Migration, faults: Sequence[Fault], transfer_type: Callable[..., ExpertTransfer] = ExpertTransfer
) -> list[list[Moved]]:
    """Run the migration once for each fault, on the same ranks, and return the ends by fault and rank."""

    def work(parallel: Parallel) -> list[Moved]:
        group: RankGroup = parallel.tp
        return [move_experts(group, migration, fault, transfer_type=transfer_type) for fault in faults]

    ranks = run_ranks(ParallelLayout(tp_size=migration.layout.num_ranks), work, timeout_s=10.0)
    return [list(ends) for ends in zip(*ranks, strict=True)]


def check(ends: Sequence[Moved], migration: Migration, *, may_be_torn: bool = False) -> None:
    """Check that all ranks have one outcome and one map, and content that fits the map."""
    assert len({(type(end.error), str(end.error)) for end in ends}) == 1, [end.error for end in ends]
    assert all(np.array_equal(end.map_LP, ends[0].map_LP) for end in ends), "the ranks have different maps"
    if isinstance(ends[0].error, TornTransferError):
        assert may_be_torn
        return
    assert [end.wrong_slots for end in ends] == [[] for _ in ends]
    done = ends[0].error is None
    assert not done or np.array_equal(ends[0].map_LP, migration.after_LP)


@pytest.mark.parametrize("num_ranks", PLANS)
def test_the_new_map_holds_and_nothing_is_sent_twice(num_ranks: int) -> None:
    migration = PLANS[num_ranks]

    def work(parallel: Parallel) -> tuple[Moved, int]:
        parallel.tp.reset_counts()
        end = move_experts(parallel.tp, migration, Fault())
        return end, parallel.tp.counts["send_receive"].num_bytes

    results = run_ranks(ParallelLayout(tp_size=num_ranks), work, timeout_s=10.0)
    check([end for end, _ in results], migration)
    assert all(end.error is None for end, _ in results)
    headers = 8 * 5  # placement epoch, layer, expert, two fingerprints
    assert sum(sent for _, sent in results) == migration.num_received * (SLOT_BYTES + headers)


def faults_of(migration: Migration, kinds: Sequence[str], clean: Sequence[Moved]) -> list[Fault]:
    """List faults of each kind on each rank: at the first, the middle and the last call that the migration makes."""
    found = []
    for kind in kinds:
        counted = {"flip_write": "write", "writes_from": "write", "flip_receive": "receive", "late": "clock"}
        for rank, end in enumerate(clean):
            calls = end.counts.get(counted.get(kind, kind), 0)
            found += [Fault(kind, rank, at) for at in sorted({0, calls // 2, calls - 1}) if at < calls]
    return found


@pytest.mark.full(but="2")
@pytest.mark.parametrize("num_ranks", PLANS)
def test_a_fault_anywhere_leaves_one_map_and_the_content_that_it_says(num_ranks: int) -> None:
    migration = PLANS[num_ranks]
    (clean,) = on_ranks(migration, [Fault()])
    kinds = ["read", "fingerprint", "write", "flip_write", "flip_receive", "empty", "late"]
    faults = faults_of(migration, kinds, clean)
    outcomes = on_ranks(migration, faults)
    completed = set()
    for fault, ends in zip(faults, outcomes, strict=True):
        check(ends, migration)
        if ends[0].error is None:
            completed.add(fault.kind)
        else:
            assert type(ends[0].error) is TransferError
            assert f"rank {fault.rank}: " in str(ends[0].error), "the rank at fault is named"
    assert completed <= {"late"}, "only the clock may be looked at after the last chunk is committed"
    partly = [ends[0] for ends in outcomes if ends[0].error and not np.array_equal(ends[0].map_LP, migration.before_LP)]
    assert partly, "some faults come after a chunk was committed, and that chunk stays"


@pytest.mark.parametrize("num_ranks", PLANS)
def test_content_that_cannot_be_restored_is_an_error_on_all_ranks(num_ranks: int) -> None:
    migration = PLANS[num_ranks]
    (clean,) = on_ranks(migration, [Fault()])
    outcomes = on_ranks(migration, faults_of(migration, ["writes_from"], clean))
    for ends in outcomes:
        check(ends, migration, may_be_torn=True)
    torn = [ends for ends in outcomes if isinstance(ends[0].error, TornTransferError)]
    assert len(torn) == len(outcomes)
    assert any(end.wrong_slots for ends in torn for end in ends), "the error is not said for nothing"
    assert torn[0][0].error is not None and torn[0][0].error.status_code == 503


def test_a_next_migration_succeeds_after_one_that_failed() -> None:
    migration = PLANS[2]
    outcomes = on_ranks(migration, [Fault("write", 1, 2), Fault()])
    check(outcomes[0], migration)
    check(outcomes[1], migration)
    assert outcomes[0][0].error is not None and outcomes[1][0].error is None


# --- ranks that do not agree ------------------------------------------------------------------------------------------


def test_ranks_that_planned_differently_move_nothing() -> None:
    migration = PLANS[2]
    other = plan_migration(migration.before_LP, migration.after_LP, migration.layout, SLOT_BYTES)

    def work(parallel: Parallel) -> list[Moved]:
        mine = migration if parallel.tp.rank == 0 else other
        by_rank = [parallel.tp.rank] * len(migration.chunks)
        return [
            move_experts(parallel.tp, mine, Fault()),
            move_experts(parallel.tp, other, Fault(), epoch=by_rank.__getitem__),
        ]

    for ends in zip(*run_ranks(ParallelLayout(tp_size=2), work, timeout_s=10.0), strict=True):
        check(ends, migration)
        assert isinstance(ends[0].error, RebalanceRefused) and ends[0].error.status_code == 409
        assert np.array_equal(ends[0].map_LP, migration.before_LP)


def test_content_of_another_placement_epoch_is_refused() -> None:
    migration = PLANS[2]

    def work(parallel: Parallel) -> Moved:
        epochs = ([0, 1, 2], [0, 0, 0])[parallel.tp.rank]
        return move_experts(parallel.tp, migration, Fault(), epoch=epochs.__getitem__)

    ends = run_ranks(ParallelLayout(tp_size=2), work, timeout_s=10.0)
    check(ends, migration)
    assert "has placement epoch" in str(ends[0].error)
    assert np.array_equal(ends[0].map_LP[0], migration.after_LP[0]), "the first chunk was of the same epoch"


def test_every_shard_of_an_expert_is_moved_among_its_own_ranks() -> None:
    """Two expert-parallel ranks, each of two ranks that share its experts."""
    migration = PLANS[2]

    def work(parallel: Parallel) -> Moved:
        position = parallel.position
        peers = [position.moe_tp_rank, 2 + position.moe_tp_rank]
        fault = Fault("flip_receive", 3, 4) if fails else Fault()
        return move_experts(parallel.tp, migration, fault, peers=peers, ep_rank=position.ep_rank)

    for fails in (False, True):
        ends = run_ranks(ParallelLayout(tp_size=4, ep_size=2), work, timeout_s=10.0)
        check(ends, migration)
        assert (ends[0].error is not None) == fails


class Dying(ExpertTransfer):
    def _commit(self, mine: _ChunkOnRank) -> None:
        raise PlantedError("gone")


def test_a_lost_rank_ends_the_others_within_the_deadline_with_their_slots_untouched() -> None:
    migration = PLANS[2]

    def work(parallel: Parallel) -> list[str] | None:
        made: list[ExpertTransfer] = []

        def kind(*args: Any, **kwargs: Any) -> ExpertTransfer:
            made.append((Dying if parallel.tp.rank == 1 else ExpertTransfer)(*args, **kwargs))
            return made[0]

        with pytest.raises((RankLostError, PlantedError)):
            move_experts(parallel.tp, migration, Fault(), transfer_type=kind)
        slots: Any = made[0]._slots
        return slots.wrong_slots(migration.before_LP)

    started = time.monotonic()
    assert run_ranks(ParallelLayout(tp_size=2), work, timeout_s=2.0) == [[], []]
    assert time.monotonic() - started < 10.0


# --- the check sees mistakes ------------------------------------------------------------------------------------------


def no_vote(self: ExpertTransfer, action: Callable[[], None]) -> None:
    """Take part in the vote, but obey only the failure of this rank (wrong)."""
    failure = None
    try:
        action()
    except (EplbError, PlantedError) as error:
        failure = str(error)
    self._group.all_agree(failure is None)
    if failure is not None:
        self._group.all_agree(True)  # the others, at their commit, wait for this rank
        raise TransferError(failure)


def commit_without_restore(self: ExpertTransfer, mine: _ChunkOnRank) -> None:
    failure = None
    try:
        mine.write_new()
    except (EplbError, PlantedError) as error:
        failure = str(error)
    if not self._group.all_agree(failure is None):
        raise TransferError(self._reasons(failure))


def write_without_reading_back(self: _ChunkOnRank, layer: int, slot: int, content: Content, prints: list[int]) -> None:
    self._slots.write(layer, self._local(slot), content)


def stage_in_the_slots(self: _ChunkOnRank) -> None:
    """Write the slots of local moves at once, before anything is sent (wrong)."""
    for index, move in enumerate(self._work.local):
        source = self._read(move.layer, move.source_slot)
        self._headers.append(self._header(move, source))
        self._spare.keep(index, source)
        for slot in move.target_slots:
            self._slots.write(move.layer, self._local(slot), source)
    for move in self._work.sends:
        source = self._read(move.layer, move.source_slot)
        self._outgoing.append((source, torch.tensor([_signed(number) for number in self._header(move, source)])))


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("target", "name", "wrong", "fault"),
    [
        (ExpertTransfer, "_together", no_vote, Fault("flip_receive", 1, 0)),
        (ExpertTransfer, "_commit", commit_without_restore, Fault("write", 1, 1)),
        (_ChunkOnRank, "_write", write_without_reading_back, Fault("flip_write", 0, 1)),
        (_ChunkOnRank, "stage_local", stage_in_the_slots, Fault()),
    ],
)
def test_a_wrong_executor_is_seen(
    monkeypatch: pytest.MonkeyPatch, target: type, name: str, wrong: Callable, fault: Fault
) -> None:
    parts = PLANS[2]
    migration = plan_migration(parts.before_LP, parts.after_LP, parts.layout, SLOT_BYTES)
    check(on_ranks(migration, [fault])[0], migration)
    monkeypatch.setattr(target, name, wrong)
    with pytest.raises(AssertionError):
        check(on_ranks(migration, [fault])[0], migration)

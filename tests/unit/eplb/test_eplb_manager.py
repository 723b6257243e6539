"""Rebalances of experts, and reasons against them: counts, history over refreshes, decisions, stages, liveness.

Shapes: L MoE layers, E logical experts, P physical experts (slots over all ranks), T tokens, K top-k.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchmarks.eplb_loads import drift, zipf
from eplb.algorithms.bounds import balancedness
from eplb.algorithms.registry import make_plan
from eplb.algorithms.types import ExpertLayout, Plan, even_split, from_bytes, to_bytes
from eplb.decision import Decision, RebalancePolicy, Situation, decide, given_plan
from eplb.errors import EplbRequestError, LayoutError, LoadsError, MapError, RebalanceRefused
from eplb.expert_location import ExpertLocationMetadata
from eplb.load_history import LoadHistory
from eplb.manager import RebalanceManager, Stage
from eplb.placement import ExpertPlacement
from tests.tiers import examples

LAYERS, EXPERTS, SLOTS, RANKS = 4, 32, 36, 4
LAYOUT = ExpertLayout(num_logical_experts=EXPERTS, num_physical_experts=SLOTS, num_ranks=RANKS)
SLOT_BYTES = 1_000_000
COUNTS = zipf(LAYERS, EXPERTS, 0.8)
LATER = drift(COUNTS, 1.5)  # takes copies in every layer
IN_FORCE = make_plan("balanced", COUNTS, LAYOUT)


def situation(counts_LE: np.ndarray = LATER, **changes: object) -> Situation:
    base = Situation(
        counts_LE=counts_LE.astype(np.float64),
        in_force=IN_FORCE,
        placement_epoch=3,
        weight_epoch=2,
        weight_version="v2",
        seconds_per_step=0.05,
        slot_bytes=SLOT_BYTES,
        bytes_per_s=1e9,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


# --- counts -----------------------------------------------------------------------------------------------------------


def routes(generator: torch.Generator, tokens: int) -> torch.Tensor:
    """Draw random routes [T, L, K]."""
    return torch.randint(0, EXPERTS, (tokens, LAYERS, 3), generator=generator)


def test_counts_are_those_of_the_passes_by_weight_epoch() -> None:
    generator, summed = torch.Generator().manual_seed(0), list[torch.Tensor]()
    history = LoadHistory(LAYERS, EXPERTS, lambda counts_LE: summed.append(counts_LE) or counts_LE, is_counted=True)
    expected: dict[int, np.ndarray] = {}
    for step in range(150):
        epoch = step // 60
        ids = routes(generator, 0 if step % 7 == 0 else step % 5 * 100)
        history.note(ids, epoch)
        counts = np.stack([np.bincount(layer.numpy().ravel(), minlength=EXPERTS) for layer in ids.unbind(1)])
        ids.zero_()  # the buffer of the next step
        expected[epoch] = expected.get(epoch, 0) + counts
    assert history.num_unseen_passes == history.num_passes == 150
    history.gather()
    assert list(expected) == [0, 1, 2] and history.weight_epoch == 2
    for counts_LE, wanted in zip(summed, expected.values(), strict=True):
        assert np.array_equal(counts_LE.numpy(), wanted)
    before = history.counts_LE.clone()
    history.gather()
    assert history.num_unseen_passes == 0 and len(summed) == 3 and torch.equal(history.counts_LE, before)
    history.note(routes(generator, 5), 2)
    history.postpone()
    assert (history.num_unseen_passes, history.num_passes) == (1, 0)
    history.gather()
    assert (history.num_unseen_passes, history.num_passes, len(summed)) == (0, 0, 4)


def window(counts_LE: np.ndarray, weight_epoch: int = 0) -> tuple[int, torch.Tensor]:
    return weight_epoch, torch.from_numpy(counts_LE)


def test_history_forgets_half_and_keeps_what_a_refresh_did_not_change() -> None:
    history = LoadHistory(LAYERS, EXPERTS)
    history.add(*window(COUNTS // 1000))
    history.add(*window(COUNTS // 1000))
    assert torch.equal(history.counts_LE, 1.5 * torch.from_numpy(COUNTS // 1000))
    same = np.random.default_rng(0).poisson(COUNTS / 1000)
    history.add(*window(same, 1))
    assert history.drift is not None and history.drift.kept and history.weight_epoch == 1
    assert history.drift.total_variation < 2 * history.drift.expected_by_chance
    assert history.counts_LE.sum() > 1.5 * same.sum()
    other = drift(COUNTS, 1.0) // 1000
    history.add(*window(other, 2))
    assert not history.drift.kept, "another distribution: the past does not count"
    assert torch.equal(history.counts_LE, torch.from_numpy(other).double())


def test_windows_without_tokens_change_nothing_and_wrong_ones_are_refused() -> None:
    history = LoadHistory(LAYERS, EXPERTS)
    history.add(*window(COUNTS, 3))
    history.add(*window(COUNTS * 0, 4))
    assert history.weight_epoch == 3 and torch.equal(history.counts_LE, torch.from_numpy(COUNTS).double())
    for wrong in (window(COUNTS[:1], 3), window(-COUNTS, 3), window(COUNTS, 2)):
        with pytest.raises(LoadsError):
            history.add(*wrong)


# --- decisions --------------------------------------------------------------------------------------------------------


def test_the_current_placement_is_measured_as_it_is() -> None:
    moved = make_plan("min_move", LATER, LAYOUT, IN_FORCE.physical_to_logical_LP)
    placement = ExpertPlacement(IN_FORCE.location(), ep_rank=1, ep_size=RANKS)
    assert np.allclose(placement.plan(LAYOUT).split_LP, IN_FORCE.split_LP, atol=1e-4)
    placement.adopt(moved.location(), torch.from_numpy(moved.split_LP))
    found = placement.plan(LAYOUT)
    assert np.array_equal(found.physical_to_logical_LP, moved.physical_to_logical_LP)
    assert np.allclose(found.split_LP, moved.split_LP, atol=1e-4)
    assert np.allclose(balancedness(LATER, found), balancedness(LATER, moved), atol=1e-3)


def test_one_rank_serves_from_first_slots() -> None:
    layout = ExpertLayout(num_logical_experts=4, num_physical_experts=4, num_ranks=1)
    located = ExpertLocationMetadata(torch.tensor([[2, 3, 0, 1]]), 4)
    plan = ExpertPlacement(located).plan(layout)
    assert plan.split_LP.tolist() == [[1.0] * 4]


def test_a_rebalance_that_pays_says_what_it_does() -> None:
    decision = decide(situation(), RebalancePolicy())
    assert decision.rebalances and decision.plan is not None and decision.migration is not None
    assert decision.after is not None and decision.after.mean > 0.97 > decision.before.mean
    assert decision.num_bytes == decision.num_experts_moved * SLOT_BYTES == decision.migration.num_bytes
    assert 0 < decision.predicted_seconds < decision.predicted_gain_s
    assert decision.reason.startswith("saves ") and "\n" not in decision.reason
    assert decision.before.mean == pytest.approx(balancedness(LATER, IN_FORCE).mean())
    assert decision.after.mean == pytest.approx(balancedness(LATER, decision.plan).mean())
    facts = decision.facts()
    assert "plan" not in facts and "migration" not in facts and facts["balancedness_after"]["mean"] > 0.97


@pytest.mark.parametrize(
    ("given", "policy", "reason"),
    [
        (situation(LATER // 10_000_000), RebalancePolicy(), "too few tokens to plan for"),
        (situation(), RebalancePolicy(threshold=0.3), "balanced enough"),
        (situation(seconds_per_step=1e-6), RebalancePolicy(), "saves .* no more than it takes"),
        (situation(slot_bytes=10**8), RebalancePolicy(every_steps=1), "saves .* no more than it takes"),
        (situation(slot_bytes=10**12), RebalancePolicy(), "saves .* no more than it takes"),
        (
            situation(in_force=make_plan("min_move", LATER, LAYOUT, IN_FORCE.physical_to_logical_LP)),
            RebalancePolicy(),
            "nothing better found",
        ),
    ],
)
def test_a_decision_against_a_rebalance_names_its_reason(
    given: Situation, policy: RebalancePolicy, reason: str
) -> None:
    decision = decide(given, policy)
    assert not decision.rebalances
    assert re.search(reason, decision.reason), decision.reason


def test_another_split_costs_nothing_and_is_taken_for_any_gain() -> None:
    decision = decide(situation(drift(COUNTS, 0.3), seconds_per_step=1e-9), RebalancePolicy())
    assert decision.rebalances and decision.num_changed_slots == 0 and decision.predicted_seconds == 0.0
    assert decision.after is not None and decision.after.mean > decision.before.mean
    assert decision.num_chunks == 1, "the new split has to be published all the same"


def test_who_asks_gets_it_although_it_does_not_pay() -> None:
    decision = decide(situation(seconds_per_step=0.0), RebalancePolicy(threshold=0.0), asked=True)
    assert decision.rebalances and decision.reason.startswith("asked for: ")
    with pytest.raises(RebalanceRefused, match="no tokens have been counted"):
        decide(situation(LATER * 0), RebalancePolicy(), asked=True)
    with pytest.raises(EplbRequestError, match="unknown algorithm"):
        decide(situation(), RebalancePolicy(algorithm="best"), asked=True)


def test_a_given_placement_is_taken_without_counts() -> None:
    located = np.roll(IN_FORCE.physical_to_logical_LP, SLOTS // RANKS, axis=1)
    decision = decide(situation(LATER * 0), RebalancePolicy(), asked=True, given=given_plan(located, None, LAYOUT))
    assert decision.rebalances and decision.algorithm == "given" and decision.plan is not None
    assert np.array_equal(decision.plan.split_LP, even_split(located, EXPERTS))
    weights = np.where(np.arange(SLOTS) < SLOTS // 2, 3.0, 1.0) * np.ones((LAYERS, 1))
    split = given_plan(located, weights, LAYOUT).split_LP
    totals = np.zeros((LAYERS, EXPERTS))
    np.add.at(totals, (np.arange(LAYERS)[:, None], located), split)
    assert np.allclose(totals, 1.0) and not np.array_equal(split, even_split(located, EXPERTS))
    for bad in (located[:, :-1], np.where(located == 3, 4, located)):
        with pytest.raises(MapError):
            given_plan(bad, None, LAYOUT)
    for bad_split in (weights[:, :-1], -weights, weights * np.nan):
        with pytest.raises(MapError):
            given_plan(located, bad_split, LAYOUT)


def test_no_stall_is_planned_over_the_budget() -> None:
    free = decide(situation(), RebalancePolicy(algorithm="balanced", max_stall_s=None), asked=True)
    assert free.num_chunks == 1
    by_layer = free.predicted_seconds / LAYERS
    bound = decide(situation(), RebalancePolicy(algorithm="balanced", max_stall_s=1.5 * by_layer), asked=True)
    assert 1 < bound.num_chunks <= LAYERS and bound.longest_chunk_s < free.longest_chunk_s
    single = decide(situation(), RebalancePolicy(algorithm="balanced", layers_per_chunk=1), asked=True)
    assert single.num_chunks == LAYERS


def test_a_decision_arrives_as_it_was_made() -> None:
    policy = RebalancePolicy(max_stall_s=0.003)
    given = situation(bytes_per_s=1.2345e9)
    for decision in (decide(given, policy), decide(situation(seconds_per_step=0.0), policy)):
        arrived = from_bytes(to_bytes(decision), Decision)
        assert arrived.facts() == decision.facts()
        assert (arrived.plan is None) == (decision.plan is None)
        if arrived.plan is not None and decision.plan is not None:
            assert arrived.migration is not None and decision.migration is not None
            assert np.array_equal(arrived.plan.physical_to_logical_LP, decision.plan.physical_to_logical_LP)
            assert np.array_equal(arrived.plan.split_LP, decision.plan.split_LP)
    changed = decide(given, policy)
    assert changed.migration is not None
    arrived = from_bytes(to_bytes(changed), Decision)
    assert arrived.migration is not None and arrived.migration.digest() == changed.migration.digest()
    other_layout = ExpertLayout(num_logical_experts=EXPERTS, num_physical_experts=SLOTS + RANKS, num_ranks=RANKS)
    other = RebalanceManager(policy, other_layout, LoadHistory(LAYERS, EXPERTS), SLOT_BYTES, Clock())
    other.start_planning()
    with pytest.raises(MapError):
        other.planned(arrived, move=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"every_steps": 0},
        {"threshold": 1.5},
        {"expert_share": -0.1},
        {"layers_per_chunk": 0},
        {"max_stall_s": 0.0},
        {"deadline_s": -1.0},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(EplbRequestError, match=next(iter(wrong))):
        RebalancePolicy(**wrong)
    with pytest.raises(LayoutError):
        ExpertLayout(num_logical_experts=4, num_physical_experts=8, num_ranks=1)


# --- stages -----------------------------------------------------------------------------------------------------------

POLICY = RebalancePolicy(layers_per_chunk=1, every_steps=10, deadline_s=5.0)
MOVE: Decision = decide(situation(placement_epoch=0, weight_epoch=0), RebalancePolicy(layers_per_chunk=1), asked=True)
STAY: Decision = decide(situation(), RebalancePolicy(threshold=0.1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def manager_at(clock: Clock) -> RebalanceManager:
    return RebalanceManager(POLICY, LAYOUT, LoadHistory(LAYERS, EXPERTS), SLOT_BYTES, clock)


def test_chunks_are_given_out_one_by_one_and_their_speed_is_kept() -> None:
    manager = manager_at(Clock())
    assert not manager.is_due(9) and manager.is_due(10)
    manager.start_planning()
    assert not manager.is_due(10)
    with pytest.raises(RebalanceRefused, match="another rebalance is running"):
        manager.start_planning()
    manager.planned(MOVE, move=True)
    assert MOVE.migration is not None
    for epoch, chunk in enumerate(MOVE.migration.chunks):
        assert manager.next_chunk(0, epoch, None) is chunk
        manager.chunk_done(0.5, epoch + 1)
    assert manager.stage is Stage.IDLE and manager.outcome is not None
    assert (manager.outcome.chunks_done, manager.outcome.dropped) == (LAYERS, None)
    handled = sum(MOVE.migration.handled_bytes(chunk) for chunk in MOVE.migration.chunks)
    with_moves = sum(1 for chunk in MOVE.migration.chunks if chunk.moves)
    assert manager.bytes_per_s == pytest.approx(handled / (0.5 * with_moves))


@pytest.mark.parametrize(
    ("weight_epoch", "placement_epoch", "refresh", "reason"),
    [
        (0, 1, "buckets of version 7 arrive", "a weight update came first: buckets of version 7 arrive"),
        (1, 1, None, "the plan is for weight epoch 0, 1 is in force"),
        (0, 2, None, "planned from placement epoch 1, 2 is in force"),
    ],
)
def test_what_comes_between_two_chunks_drops_the_rest(
    weight_epoch: int, placement_epoch: int, refresh: str | None, reason: str
) -> None:
    manager = manager_at(Clock())
    manager.start_planning()
    manager.planned(MOVE, move=True)
    assert manager.next_chunk(0, 0, None) is not None
    manager.chunk_done(0.1, 1)
    assert manager.next_chunk(weight_epoch, placement_epoch, refresh) is None
    assert manager.stage is Stage.IDLE and manager.outcome is not None
    assert (manager.outcome.chunks_done, manager.outcome.num_chunks) == (1, LAYERS)
    assert manager.outcome.dropped == reason


def test_the_last_rebalances_are_remembered() -> None:
    """A rebalance that moved experts, whole or in part, is remembered; an evaluation that moved nothing is not."""
    clock = Clock()
    manager = manager_at(clock)
    for _ in range(20):
        manager.start_planning()
        manager.planned(MOVE, move=True)
        manager.drop("enough")
    manager.start_planning()
    manager.planned(MOVE, move=False)
    clock.now = 7.0
    found = manager.status()["rebalances"]
    assert [facts["number"] for facts in found] == list(range(5, 21))
    assert found[-1]["age_s"] == 7.0 and found[-1]["dropped"] == "enough" and found[-1]["reason"] == MOVE.reason


def test_what_a_rebalance_came_to_is_measured_at_the_next_evaluation_n30() -> None:
    """N30: only loads since then count, under the placement in force; until enough have come, it is a prediction."""
    manager = manager_at(Clock())
    manager.start_planning()
    manager.planned(MOVE, move=True)
    manager.drop("enough")
    measured = [facts["balancedness_measured"] for facts in manager.status()["rebalances"]]
    assert measured == [None]
    few, many = np.zeros_like(COUNTS, dtype=np.float64), COUNTS.astype(np.float64)
    few[:, 0] = 1
    for counts_LE, expected in ((few, None), (many, balancedness(many, IN_FORCE)), (few, balancedness(many, IN_FORCE))):
        manager.history.window_LE = torch.from_numpy(counts_LE)
        manager.note_loads(IN_FORCE)
        (facts,) = manager.status()["rebalances"]
        found = facts["balancedness_measured"]
        assert found == (None if expected is None else {"mean": expected.mean(), "least": expected.min()})


def test_a_window_is_what_the_last_gathering_added() -> None:
    history = LoadHistory(LAYERS, EXPERTS, is_counted=True)
    generator = torch.Generator().manual_seed(0)
    for tokens in (50, 70, 0):
        ids = routes(generator, tokens)
        history.note(ids, 0)
        history.gather()
        assert history.window_LE.sum() == ids.numel()


def test_what_takes_too_long_is_seen_within_its_deadline() -> None:
    clock = Clock()
    manager = manager_at(clock)
    clock.now = 1000.0
    assert manager.stuck is None, "idle is never stuck"
    assert manager.status()["last_evaluation_age_s"] == 1000.0
    manager.start_planning()
    clock.now = 1005.0
    assert manager.stuck is None
    clock.now = 1005.5
    assert manager.stuck == "a rebalance is stuck: planning for 5.5 s, at most 5 s"
    manager.planned(MOVE, move=True)
    assert manager.stuck is None and manager.status()["last_evaluation_age_s"] == 0.0
    clock.now = 1010.0
    manager.chunk_done(4.5, 1)
    clock.now = 1015.0
    assert manager.stuck is None, "a chunk is progress"
    clock.now = 1015.5
    assert manager.stuck is not None and "moving" in manager.stuck
    manager.drop("given up")
    assert manager.stuck is None


class Stages(RuleBasedStateMachine):
    """Any order of events against a model that knows only which map is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.manager = manager_at(self.clock)
        self.weight_epoch = self.placement_epoch = 0
        self.decision: Decision | None = None
        self.planned_for = (0, 0)
        self.done = 0
        assert MOVE.plan is not None
        self.maps = {True: IN_FORCE.physical_to_logical_LP, False: MOVE.plan.physical_to_logical_LP}
        self.in_force = self.maps[True].copy()

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.manager.stage is Stage.IDLE)
    @rule()
    def start(self) -> None:
        self.manager.start_planning()
        self.planned_for = self.weight_epoch, self.placement_epoch

    @precondition(lambda self: self.manager.stage is Stage.PLANNING)
    @rule(kind=st.sampled_from(["move", "dry run", "stay", "failed"]))
    def finish_planning(self, kind: str) -> None:
        if kind == "failed":
            self.manager.planning_failed(ValueError("no plan"))
            return
        weight_epoch, placement_epoch = self.planned_for
        target = given_plan(self.maps[np.array_equal(self.in_force, self.maps[False])], None, LAYOUT)
        in_force: Plan = given_plan(self.in_force, None, LAYOUT)
        now = situation(in_force=in_force, weight_epoch=weight_epoch, placement_epoch=placement_epoch)
        self.decision = STAY if kind == "stay" else decide(now, POLICY, asked=True, given=target)
        self.manager.planned(self.decision, move=kind != "dry run")
        self.done = 0
        assert (self.manager.stage is Stage.MOVING) == (kind == "move")

    @precondition(lambda self: self.manager.stage is Stage.MOVING)
    @rule(refresh=st.sampled_from([None, None, "open"]), fails=st.booleans())
    def step(self, refresh: str | None, fails: bool) -> None:
        assert self.decision is not None and self.decision.migration is not None
        chunk = self.manager.next_chunk(self.weight_epoch, self.placement_epoch, refresh)
        fits = (self.weight_epoch, self.placement_epoch) == self.planned_for and refresh is None
        assert (chunk is not None) == fits
        if chunk is None:
            assert self.manager.outcome is not None and self.manager.outcome.dropped
        elif fails:
            self.manager.drop("failed")
        else:
            layers = list(chunk.layers)
            assert np.array_equal(self.in_force[layers], self.decision.migration.before_LP[layers])
            self.in_force[layers] = self.decision.migration.after_LP[layers]
            self.placement_epoch += 1
            self.planned_for = self.planned_for[0], self.placement_epoch
            self.done += 1
            self.manager.chunk_done(0.1, self.placement_epoch)

    @rule(moves_slots=st.booleans())
    def refresh(self, moves_slots: bool) -> None:
        """Commit a weight epoch, with a placement of its own if `moves_slots`."""
        self.weight_epoch += 1
        if moves_slots:
            self.placement_epoch += 1
            self.in_force = self.maps[True].copy()

    @invariant()
    def bookkeeping(self) -> None:
        status = self.manager.status()
        assert (status["stage"] == "moving") == (status["chunks_left"] > 0)
        if self.manager.stage is Stage.IDLE:
            assert status["stuck"] is None
        if self.manager.outcome is not None and self.manager.outcome.dropped is None:
            assert self.manager.outcome.chunks_done == self.manager.outcome.num_chunks


TestStages = Stages.TestCase
TestStages.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)

"""`balanced`, `min_move` and `auto`: invariants on random inputs, exact optima on small ones, targets on large ones."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eplb_loads import drift, log_normal, synthetic, zipf
from eplb.algorithms.auto import auto
from eplb.algorithms.balanced import balanced
from eplb.algorithms.balanced_by_node import balanced_by_node
from eplb.algorithms.bounds import balancedness, cross_rank_copies, even_split_bound, rank_loads
from eplb.algorithms.deepseek import deepseek
from eplb.algorithms.min_move import min_move
from eplb.algorithms.registry import PLANNERS, make_plan
from eplb.algorithms.split import LEVEL, LayerSplit
from eplb.algorithms.types import ExpertLayout, Plan, checked_map, count_duplicates, replica_counts
from eplb.errors import EplbRequestError, LayoutError, LoadsError, MapError
from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import add_cli_args
from rollout.core.errors import StartupError
from tests.eplb_optimum import Placement, can_reach, even_maximum, placements, placements_after, weighted_maximum
from tests.tiers import examples


@st.composite
def layouts(draw: st.DrawFn) -> ExpertLayout:
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(1, 16))
    least = -(-experts // ranks)
    slots = draw(st.integers(least, min(experts, least + 3)))
    return ExpertLayout(num_logical_experts=experts, num_physical_experts=slots * ranks, num_ranks=ranks)


def counts_for(layout: ExpertLayout) -> st.SearchStrategy[np.ndarray]:
    count = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
    row = st.lists(count, min_size=layout.num_logical_experts, max_size=layout.num_logical_experts)
    return st.lists(row, min_size=1, max_size=3).map(np.array)


def require_valid(plan: Plan, counts_LE: np.ndarray) -> None:
    """Check invariant I1, and the other facts that hold for every plan."""
    layout, placed = plan.layout, plan.physical_to_logical_LP
    checked_map(placed, layout, len(counts_LE))  # coverage, range, no duplicates
    location = plan.location()
    for layer, row in enumerate(placed):
        for expert in range(layout.num_logical_experts):
            slots = location.slots_of(layer, expert)
            assert [row[slot] for slot in slots] == [expert] * len(slots)
            assert len({slot // layout.slots_per_rank for slot in slots}) == len(slots)
            assert plan.split_LP[layer, slots].sum() == pytest.approx(1.0)
    assert (plan.split_LP >= 0).all()
    assert replica_counts(placed, layout.num_logical_experts).sum() == placed.size
    assert rank_loads(counts_LE, plan).mean(axis=1) == pytest.approx(np.ones(len(counts_LE)))


@settings(max_examples=examples(120, gate=10), deadline=None)
@given(st.data())
def test_balanced_is_valid_deterministic_and_scale_invariant(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    counts = data.draw(counts_for(layout))
    plan = balanced(counts, layout)
    require_valid(plan, counts)
    assert (balancedness(counts, plan) <= even_split_bound(counts, layout) + 1e-9).all()
    for factor in (1, 3, 1000):
        assert np.array_equal(balanced(counts * factor, layout).physical_to_logical_LP, plan.physical_to_logical_LP)


@settings(max_examples=examples(120, gate=10), deadline=None)
@given(st.data())
def test_min_move_is_valid_deterministic_and_scale_invariant(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    before, after = data.draw(counts_for(layout)), data.draw(counts_for(layout))
    before, after = before[: len(after)], after[: len(before)]
    current = balanced(before, layout).physical_to_logical_LP
    plan = min_move(after, layout, current)
    require_valid(plan, after)
    stale = Plan("stale", "", layout, current, balanced(before, layout).split_LP)
    assert (balancedness(after, plan) >= np.minimum(0.98, balancedness(after, stale)) - 1e-3).all()
    again = min_move(after * 7, layout, current)
    assert np.array_equal(again.physical_to_logical_LP, plan.physical_to_logical_LP)
    assert again.split_LP == pytest.approx(plan.split_LP)


def test_no_move_where_the_split_alone_is_enough() -> None:
    layout = ExpertLayout(num_logical_experts=4, num_physical_experts=6, num_ranks=2)
    current = np.array([[0, 1, 2, 0, 1, 3]])
    plan = min_move(np.array([[50, 10, 5, 35]]), layout, current)
    assert np.array_equal(plan.physical_to_logical_LP, current)
    assert balancedness(np.array([[50, 10, 5, 35]]), plan)[0] > 0.999
    assert plan.split_LP[0, 0] > plan.split_LP[0, 3]  # the rank that has less else takes more of expert 0


def small_case(
    seed: int, experts: int, ranks: int, slots: int, sigma: float = 0.6
) -> tuple[ExpertLayout, np.ndarray, np.ndarray]:
    """Return a layout, the current loads, and a placement made for earlier loads."""
    layout = ExpertLayout(num_logical_experts=experts, num_physical_experts=ranks * slots, num_ranks=ranks)
    counts = log_normal(1, experts, 0.7, seed)
    return layout, drift(counts, sigma, seed + 1000), balanced(counts, layout).physical_to_logical_LP


SHAPES = [(5, 3, 2), (4, 3, 2), (5, 3, 3), (7, 2, 4), (6, 3, 3), (7, 3, 3)]
# Up to 16 slots every move is tried; beyond, the moves with the best estimates.
LARGER = [(8, 3, 4), (10, 4, 3), (12, 4, 4), (10, 4, 4), (16, 4, 5), (20, 5, 5), (20, 6, 4)]


@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "sigma"), [(*shape, 0.6) for shape in SHAPES] + [(*shape, 0.4) for shape in LARGER]
)
def test_min_move_is_within_one_copy_of_the_optimum(experts: int, ranks: int, slots: int, sigma: float) -> None:
    for seed in range(5):
        layout, counts, current = small_case(seed, experts, ranks, slots, sigma)
        plan = min_move(counts, layout, current)
        copies = int(cross_rank_copies(current, plan.physical_to_logical_LP, layout).sum())
        # The requested cap, or the one that it reached if the requested cap is out of reach.
        cap = max(1 / 0.98, 1 / float(balancedness(counts, plan)[0])) + 1e-4
        shares, held = as_placement(counts, current, ranks)
        assert not can_reach(shares, held, cap, min(copies - 2, 3)), (seed, copies)


def test_a_planner_that_moves_too_much_is_not_within_one_copy_of_the_optimum() -> None:
    layout, counts, current = small_case(0, 12, 4, 4, 0.4)
    copies = int(cross_rank_copies(current, balanced(counts, layout).physical_to_logical_LP, layout).sum())
    shares, held = as_placement(counts, current, 4)
    assert can_reach(shares, held, 1 / 0.98, min(copies - 2, 3))


@pytest.mark.parametrize(("experts", "ranks", "slots"), SHAPES)
def test_min_move_reaches_every_target_that_can_be_reached(experts: int, ranks: int, slots: int) -> None:
    for seed in range(5):
        layout, counts, current = small_case(seed, experts, ranks, slots)
        if balancedness(counts, min_move(counts, layout, current))[0] < 0.9799:
            shares, _ = as_placement(counts, current, ranks)
            assert all(weighted_maximum(shares, held) > 1 / 0.98 for held in placements(experts, ranks, slots)), seed


def as_placement(counts_LE: np.ndarray, current_LP: np.ndarray, ranks: int) -> tuple[list[float], Placement]:
    """Return the loads of a layer's experts, and the experts that each rank holds."""
    shares = (counts_LE[0] / counts_LE[0].sum() * ranks).tolist()
    return shares, tuple(frozenset(row) for row in current_LP.reshape(ranks, -1).tolist())


def test_the_enumeration_by_copies_is_complete() -> None:
    current = (frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 4}))
    found = [placement for copies in range(7) for placement in placements_after(current, 5, copies)]
    assert len(found) == len(set(found)) and set(found) == set(placements(5, 3, 2))
    assert next(placements_after(current, 5, 0)) == current
    assert can_reach([1, 1, 1, 1, 1], current, 2.0, 0) and not can_reach([1, 1, 1, 1, 1], current, 1.0, 6)


@pytest.mark.parametrize(("experts", "ranks", "slots"), SHAPES)
def test_balanced_against_the_best_even_placement(experts: int, ranks: int, slots: int) -> None:
    for seed in range(5):
        layout, counts, current = small_case(seed, experts, ranks, slots)
        shares, _ = as_placement(counts, current, ranks)
        best = min(even_maximum(shares, placement) for placement in placements(experts, ranks, slots))
        plan = balanced(counts, layout)
        assert even_split_bound(counts, layout)[0] >= 1 / best - 1e-9  # the bound is one
        assert balancedness(counts, plan)[0] >= 0.97 / best, seed


def test_a_settled_split_is_the_exact_optimum() -> None:
    generator = random.Random(0)
    for _ in range(60):
        ranks, slots, experts = 4, 3, generator.randint(4, 9)
        held = [generator.sample(range(experts), slots) for _ in range(ranks)]
        shares = [generator.random() if any(e in row for row in held) else 0.0 for e in range(experts)]
        shares = [share * ranks / sum(shares) for share in shares]
        split = LayerSplit(shares, held)
        split.settle()
        optimum = weighted_maximum(shares, tuple(frozenset(row) for row in held))
        assert max(split.loads) == pytest.approx(max(optimum, LEVEL), abs=2e-4)
        for cap in (optimum * 1.01, optimum * 0.9):
            excess, stuck = LayerSplit(shares, held).relieve(cap)
            assert (excess < 1e-3) == (cap > optimum) and any(stuck) == (cap < optimum)


def test_settling_ends_where_many_ranks_are_a_little_over_the_level() -> None:
    """Shifts too small to follow add up over the ranks; the next cap must rise all the same."""
    layout = ExpertLayout(num_logical_experts=256, num_physical_experts=288, num_ranks=32)
    counts = synthetic("lognormal:1", 58, 256)
    current = balanced(counts, layout).physical_to_logical_LP
    for sigma in (0.1, 0.3):
        later = drift(counts, sigma)
        assert (balancedness(later, min_move(later, layout, current)) >= 0.98 - 1e-5).all()


SERVED = [(256, 288, 32), (384, 416, 32), (384, 448, 64), (128, 160, 32)]


@pytest.mark.parametrize(("experts", "slots", "ranks"), SERVED)
@pytest.mark.parametrize("loads", ["zipf:0.5", "zipf:0.8", "zipf:1.2", "lognormal:1"])
def test_targets_on_served_models(experts: int, slots: int, ranks: int, loads: str) -> None:
    layout = ExpertLayout(num_logical_experts=experts, num_physical_experts=slots, num_ranks=ranks)
    counts = synthetic(loads, 4, experts)
    fresh = balanced(counts, layout)
    assert count_duplicates(fresh.physical_to_logical_LP, layout) == 0
    wanted = np.minimum(0.99 if ranks == 64 else 0.999, even_split_bound(counts, layout) - 0.0005)
    assert (balancedness(counts, fresh) >= wanted).all()
    later = drift(counts, 0.3)
    moved = min_move(later, layout, fresh.physical_to_logical_LP)
    copies = cross_rank_copies(fresh.physical_to_logical_LP, moved.physical_to_logical_LP, layout)
    assert (balancedness(later, moved) >= 0.98 - 1e-5).all()
    assert copies.sum() / (4 * slots) <= (0.025 if experts == 128 else 0.02)
    reference = deepseek(later, layout)
    others = cross_rank_copies(fresh.physical_to_logical_LP, reference.physical_to_logical_LP, layout)
    assert others.sum() / (4 * slots) > 0.85


@settings(max_examples=examples(120, gate=10), deadline=None)
@given(st.data())
def test_auto_explains_and_is_never_worse_than_keeping_the_map(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    before, after = data.draw(counts_for(layout)), data.draw(counts_for(layout))
    before, after = before[: len(after)], after[: len(before)]
    target, free = data.draw(st.sampled_from([0.7, 0.9, 0.98, 1.0])), data.draw(st.booleans())
    current = balanced(before, layout).physical_to_logical_LP
    plan = auto(after, layout, current, target=target, copies_are_free=free)
    require_valid(plan, after)
    kept = np.array([1 / best_split(counts, row, layout) for counts, row in zip(after, current, strict=True)])
    reached = balancedness(after, plan)
    assert (reached >= np.minimum(target, kept) - 2e-3).all()
    copies = cross_rank_copies(current, plan.physical_to_logical_LP, layout).sum(axis=1)
    if free:
        assert plan.reason.startswith("balanced: a full refresh writes every slot")
        return
    # What a copy costs: none where the split alone is enough, a whole layer only for a gain that is worth it.
    assert not copies[kept >= target + 1e-3].any()
    moved = min_move(after, layout, current, target=target)
    few = cross_rank_copies(current, moved.physical_to_logical_LP, layout).sum(axis=1)
    afresh = (plan.physical_to_logical_LP != moved.physical_to_logical_LP).any(axis=1)
    assert (copies[~afresh] == few[~afresh]).all()
    assert (reached[afresh] > balancedness(after, moved)[afresh] + 0.02).all()
    assert (balancedness(after, moved)[afresh] < target).all()
    assert plan.algorithm == ("balanced" if afresh.all() else "min_move")
    assert plan.reason.startswith(f"{plan.algorithm}: ") and ("afresh" in plan.reason) == bool(afresh.any())


def best_split(counts_E: np.ndarray, row_P: np.ndarray, layout: ExpertLayout) -> float:
    """Return the least possible maximum load of a rank if no expert is copied."""
    total = counts_E.sum()
    shares = counts_E / total if total else np.full(len(counts_E), 1 / len(counts_E))
    held = tuple(frozenset(experts) for experts in row_P.reshape(layout.num_ranks, -1).tolist())
    return max(1.0, weighted_maximum((shares * layout.num_ranks).tolist(), held))


def test_auto_picks_and_says_why() -> None:
    layout = ExpertLayout(num_logical_experts=16, num_physical_experts=24, num_ranks=4)
    counts = zipf(2, 16, 0.8)
    current = balanced(counts, layout).physical_to_logical_LP
    assert auto(counts, layout).reason == "balanced: no placement is in force"
    assert auto(counts, layout, current).algorithm == "min_move"
    free = auto(counts, layout, current, copies_are_free=True)
    assert free.algorithm == "balanced" and "a full refresh writes every slot" in free.reason
    twice = current.copy()
    rank = twice[0, :6]
    single = next(slot for slot in range(6) if (twice[0] == rank[slot]).sum() > 1)
    rank[single] = rank[(single + 1) % 6]
    plan = auto(counts, layout, twice)
    assert plan.algorithm == "balanced" and "twice on rank 0 of layer 0" in plan.reason


def test_auto_places_afresh_only_the_layers_that_need_it() -> None:
    layout = ExpertLayout(num_logical_experts=64, num_physical_experts=64, num_ranks=16)
    counts = zipf(3, 64, 0.8, 3)
    current = balanced(log_normal(3, 64, 1.0, 9), layout).physical_to_logical_LP
    current[2] = balanced(counts, layout).physical_to_logical_LP[2]
    moved, fresh, plan = min_move(counts, layout, current), balanced(counts, layout), auto(counts, layout, current)
    stuck, near, kept = balancedness(counts, moved)
    assert stuck < balancedness(counts, fresh)[0] - 0.02 and near > balancedness(counts, fresh)[1] - 0.02
    assert np.array_equal(plan.physical_to_logical_LP[0], fresh.physical_to_logical_LP[0])
    assert np.array_equal(plan.physical_to_logical_LP[1:], moved.physical_to_logical_LP[1:])
    assert plan.algorithm == "min_move" and "1 of 3 layers is placed afresh" in plan.reason
    assert kept == pytest.approx(balancedness(counts, fresh)[2])


@settings(max_examples=examples(120, gate=10), deadline=None)
@given(st.data())
def test_balanced_by_node_keeps_groups_on_nodes_and_is_valid(data: st.DataObject) -> None:
    nodes, per_node = data.draw(st.integers(1, 4), "nodes"), data.draw(st.integers(1, 4), "ranks of a node")
    groups = nodes * data.draw(st.integers(1, 2), "groups of a node")
    experts = groups * data.draw(st.integers(1, 4), "experts of a group")
    least = -(-experts // (nodes * per_node))
    slots = data.draw(st.integers(least, min(experts // nodes, least + 3)), "slots of a rank")
    layout = ExpertLayout(
        num_logical_experts=experts,
        num_physical_experts=slots * nodes * per_node,
        num_ranks=nodes * per_node,
        num_nodes=nodes,
        num_groups=groups,
    )
    counts = data.draw(counts_for(layout), "counts")
    plan = balanced_by_node(counts, layout)
    require_valid(plan, counts)
    for row in plan.physical_to_logical_LP:
        of_nodes = [{int(expert) * groups // experts for expert in node} for node in np.split(row, nodes)]
        assert sum(map(len, of_nodes)) == groups, "a group is on two nodes"
    if nodes == 1:  # of experts with equal loads another one may have the copies
        assert slot_loads(plan, counts) == pytest.approx(slot_loads(balanced(counts, layout), counts))


def slot_loads(plan: Plan, counts_LE: np.ndarray) -> np.ndarray:
    """Return the loads of the slots of each layer, ascending, where copies share evenly."""
    table = plan.physical_to_logical_LP
    copies_LE = replica_counts(table, counts_LE.shape[1])
    return np.sort(np.take_along_axis(counts_LE / copies_LE, table, axis=1))


def test_a_planner_by_nodes_refuses_what_nodes_cannot_hold() -> None:
    sizes = {"num_logical_experts": 8, "num_ranks": 4, "num_nodes": 2}
    with pytest.raises(LayoutError, match="3 expert groups cannot be divided evenly over 2 nodes"):
        balanced_by_node(
            np.ones((1, 9)), ExpertLayout(**sizes | {"num_logical_experts": 9}, num_physical_experts=12, num_groups=3)
        )
    with pytest.raises(LayoutError, match="each of 2 ranks needs at most one for each of 4 experts"):
        balanced_by_node(np.ones((1, 8)), ExpertLayout(**sizes, num_physical_experts=20, num_groups=8))


def test_a_planner_is_a_file_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planner_of_a_user.py").write_text(
        "from eplb.algorithms.balanced import balanced\n\ndef of_a_user(counts_LE, layout):\n"
        "    return balanced(counts_LE, layout)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(PLANNERS, "of_a_user", ("planner_of_a_user", ()))
    layout, counts = ExpertLayout(num_logical_experts=8, num_physical_experts=12, num_ranks=2), zipf(2, 8, 0.8)
    current = balanced(counts, layout).physical_to_logical_LP
    for name in PLANNERS:
        checked_map(make_plan(name, counts, layout, current).physical_to_logical_LP, layout, 2, duplicates=True)
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    assert parser.parse_args(["--model-path", "m", "--eplb-algorithm", "min_move"]).eplb_algorithm == "min_move"
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "m", "--eplb-algorithm", "best"])
    with pytest.raises(StartupError, match="--eplb-algorithm must be one of auto, "):
        check_settings(ServerArgs(model_path="m", eplb_algorithm="best"))


def test_wrong_inputs_are_one_clear_line() -> None:
    def layout(experts: int, slots: int, ranks: int, **more: int) -> ExpertLayout:
        return ExpertLayout(num_logical_experts=experts, num_physical_experts=slots, num_ranks=ranks, **more)

    for arguments, more, words in [
        ((256, 288, 31), {}, "288 slots cannot be divided evenly over 31 ranks"),
        ((256, 224, 32), {}, "224 slots cannot hold 256 logical experts"),
        ((2, 12, 4), {}, "each of 4 ranks needs at most one for each of 2 experts"),
        ((16, 24, 4), {"num_nodes": 3}, "4 ranks do not divide over 3 nodes"),
        ((16, 24, 4), {"num_groups": 5}, "16 logical experts do not divide into 5 groups"),
        ((16, 24, 0), {}, "num_ranks must be at least 1, got 0"),
    ]:
        with pytest.raises(LayoutError, match=words):
            layout(*arguments, **more)
    small = layout(3, 4, 2)
    counts = np.array([[1, 2, 3]])
    for given_map, words in [
        ([[0, 1, 0, 1]], "layer 0: no slot holds expert 2"),
        ([[0, 0, 1, 2]], "layer 0: rank 0 holds expert 0 twice"),
        ([[0, 1, 2, 3]], "slot 3 holds expert 3; the model has 3"),
        ([[0, 1, 2]], r"the map has the shape \[1, 3\], expected \[1, 4\]"),
        ([[0.0, 1.0, 2.0, 0.0]], "the map must hold integers"),
    ]:
        with pytest.raises(MapError, match=words):
            min_move(counts, small, np.array(given_map))
    for wrong in ([[1, 2]], [[1, -2, 3]], [[1, float("nan"), 3]], [1, 2, 3]):
        with pytest.raises(LoadsError):
            balanced(np.array(wrong), small)
    with pytest.raises(EplbRequestError, match=f"'best'; choose from {', '.join(PLANNERS)}"):
        make_plan("best", counts, small)
    with pytest.raises(EplbRequestError, match="needs the placement in force"):
        make_plan("min_move", counts, small)
    with pytest.raises(EplbRequestError, match="target balancedness"):
        make_plan("auto", counts, small, target=1.5)
    with pytest.raises(LoadsError, match="zipf:EXPONENT"):
        synthetic("pareto:1", 1, 4)


@pytest.mark.mutant
def test_the_checks_see_wrong_plans() -> None:
    layout = ExpertLayout(num_logical_experts=3, num_physical_experts=4, num_ranks=2)
    counts = np.array([[1, 2, 3]])
    good = balanced(counts, layout)
    require_valid(good, counts)
    wrong_split = Plan("x", "", layout, good.physical_to_logical_LP, np.ones((1, 4)))
    twice = Plan("x", "", layout, np.array([[2, 2, 0, 1]]), np.array([[0.5, 0.5, 1, 1]]))
    for plan in (wrong_split, twice):
        with pytest.raises((AssertionError, MapError)):
            require_valid(plan, counts)

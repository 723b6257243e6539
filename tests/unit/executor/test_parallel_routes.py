"""Routes that an engine of several ranks returns equal the routes of one rank, row by row, in steps of every kind.

With scattered tokens (all_to_all over attention-TP ranks, each of which routes a slice) and without.
`test_parallel_routes_noticed.py` shows that mistakes are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollout.core.messages.io_struct import AbortReqInput
from rollout.layers.moe.router import TopKRouter
from tests.model_zoo import logical_tensors
from tests.parallel_harness import ParallelHarness
from tests.reference import reference_forward
from tests.routes_judge import ALL_TO_ALL, EXPERTS, LAYOUTS, SMALL_POOL, World, finished, submit_all

pytestmark = pytest.mark.full(but="dp2 of tp4 all-to-all, 3")

SEEDS = [3, 4]
CASES = [(name, seed) for name in LAYOUTS for seed in SEEDS]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    return {seed: World(tmp_path_factory.mktemp("routes") / "model", seed) for seed in SEEDS}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def case(request: pytest.FixtureRequest, worlds: dict[int, World]) -> tuple[str, World]:
    layout, seed = request.param
    return layout, worlds[seed]


@pytest.fixture(scope="module")
def engine(case: tuple[str, World]) -> Iterator[ParallelHarness]:
    """An engine with default settings, whose prefix cache goes from one test to the next."""
    with case[1].engine(case[0]) as harness:
        yield harness


@pytest.fixture
def world(case: tuple[str, World]) -> World:
    return case[1]


def num_rows(harness: ParallelHarness, rid: str) -> int:
    return len(harness.results[rid].routes)


# --- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_the_judge_is_right_and_routers_are_decisive(worlds: dict[int, World], seed: int) -> None:
    """One rank agrees with plain float64 without an engine, and no choice depends on rounding."""
    world = worlds[seed]
    ids = world.prompt(1, 40)
    result = world.judge.says(ids, 6)
    config = world.judge._harness.scheduler.runner.state.model.config
    want = reference_forward(config, logical_tensors(world.folder), ids + result.token_ids)
    assert np.array_equal(result.routes, want.routes[:-1].numpy())
    assert len(np.unique(result.routes)) == EXPERTS
    assert len(np.unique(result.routes.reshape(len(result.routes), -1), axis=0)) > len(result.routes) // 2
    smallest = least_margin(world, ids + result.token_ids)
    assert smallest > 1e-6, smallest


def least_margin(world: World, ids: list[int]) -> float:
    """Return the smallest gap between neighbouring logits in any router's order.

    The order ends with the first expert that was not chosen.
    """
    gaps = []

    def look(router: TopKRouter, residual: torch.Tensor, hidden: torch.Tensor, norm: Any, *rest: Any) -> Any:
        normed, weights, chosen = call(router, residual, hidden, norm, *rest)
        rows = router.ops.storage.matrix_place(router.weight, range(EXPERTS), router.hidden_size).read()
        logits = (normed @ rows.T).sort(dim=-1, descending=True).values[:, : router.top_k + 1]
        gaps.append(float((logits[:, :-1] - logits[:, 1:]).min()))
        return normed, weights, chosen

    call = TopKRouter.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopKRouter, "__call__", look)
        with ParallelHarness(world.folder, tp_size=2, ep_size=2) as harness:
            harness.generate([ids], {"max_new_tokens": 1})
    return min(gaps)


def test_tokens_are_scattered_where_they_should_be(engine: ParallelHarness, case: tuple[str, World]) -> None:
    assert all(s.runner.state.model.scatters_tokens == (case[0] in ALL_TO_ALL) for s in engine.schedulers)


# --- parts of a step --------------------------------------------------------------------------------------------------


def test_routes_are_right_for_tokens_that_split_unevenly_over_ranks(engine: ParallelHarness, world: World) -> None:
    """Odd and even numbers of tokens together, and a decode batch that shrinks to one."""
    wanted = {}
    for number, (length, count) in enumerate([(1, 9), (2, 1), (3, 4), (5, 7), (7, 2), (16, 5), (33, 3), (64, 1)]):
        rid = engine.submit(world.prompt(10 + number, length), params={"max_new_tokens": count})
        wanted[rid] = count
    assert finished(engine, world, wanted) == []


def test_fewer_tokens_than_ranks(engine: ParallelHarness, world: World) -> None:
    for length in (1, 2, 3):
        assert finished(engine, world, submit_all(engine, [world.prompt(30 + length, length)])) == []


def test_idle_data_parallel_ranks(engine: ParallelHarness, world: World) -> None:
    last = engine.num_dp_ranks - 1
    prompts = [world.prompt(40 + length, length) for length in (1, 6, 21)]
    assert finished(engine, world, submit_all(engine, prompts, dp_rank=last)) == []


def test_prefix_hits_on_the_same_rank_and_on_another(engine: ParallelHarness, world: World) -> None:
    ids = world.prompt(50, 37)
    assert finished(engine, world, submit_all(engine, [ids], dp_rank=0)) == []
    again = engine.submit(ids, params={"max_new_tokens": 6}, dp_rank=0)
    longer = engine.submit([*ids, 7, 8, 9], params={"max_new_tokens": 6}, dp_rank=0)
    elsewhere = engine.submit(ids, params={"max_new_tokens": 6}, dp_rank=engine.num_dp_ranks - 1)
    assert finished(engine, world, dict.fromkeys((again, longer, elsewhere), 6)) == []
    hits = [engine.results[rid].finished.cached_tokens for rid in (again, longer, elsewhere)]  # type: ignore[union-attr]
    assert hits[0] == 36 and hits[1] >= 36
    assert hits[2] == (0 if engine.num_dp_ranks > 1 else 36)
    assert [num_rows(engine, rid) for rid in (again, longer, elsewhere)] == [42, 45, 42]


def test_a_neighbour_that_does_not_ask(engine: ParallelHarness, world: World) -> None:
    prompts = [world.prompt(60 + number, 5 + number) for number in range(8)]
    asked = [number % 3 != 1 for number in range(8)]
    rids = [
        engine.submit(
            ids, params={"max_new_tokens": 5}, dp_rank=number % engine.num_dp_ranks, return_routed_experts=yes
        )
        for number, (ids, yes) in enumerate(zip(prompts, asked))
    ]
    assert finished(engine, world, dict.fromkeys(rids, 5)) == []
    has_rows = [engine.results[rid].finished.routed_experts is not None for rid in rids]  # type: ignore[union-attr]
    assert has_rows == asked
    later = submit_all(engine, prompts, num_new=5)  # on the KV of requests that did not ask, too
    assert finished(engine, world, later) == []


@pytest.mark.parametrize("start", [1, 19, 20, 24, 25])
def test_rows_from_a_start_on(engine: ParallelHarness, world: World, start: int) -> None:
    """The start is in the prompt, at its end, in the output, or at the end of the output."""
    rid = engine.submit(world.prompt(70, 20), params={"max_new_tokens": 6}, routed_experts_start_len=start)
    assert finished(engine, world, {rid: 6}) == []
    payload = engine.results[rid].finished.routed_experts  # type: ignore[union-attr]
    assert (payload.start, payload.num_rows) == (start, 25 - start)  # type: ignore[union-attr]


def test_aborts_while_decoding_and_while_waiting(engine: ParallelHarness, world: World) -> None:
    prompts = [world.prompt(80 + number, 9 + number) for number in range(4)]
    wanted = submit_all(engine, prompts, num_new=30)
    for _ in range(5):
        engine.tick()
    late = engine.submit(world.prompt(85, 12), params={"max_new_tokens": 30}, dp_rank=0)
    first, *_, last = wanted
    engine.channel.inbox.append(AbortReqInput(rids=[first, last, late]))
    assert finished(engine, world, wanted | {late: 30}) == []
    for rid, length in ((first, 9), (last, 12)):
        result = engine.results[rid]
        assert result.finished.reason.type == "abort" and 3 < len(result.token_ids) < 30  # type: ignore[union-attr]
        assert num_rows(engine, rid) == length + len(result.token_ids) - 1
    assert num_rows(engine, late) == 0


# --- settings of their own --------------------------------------------------------------------------------------------


def test_routes_are_right_for_prompts_in_chunks(case: tuple[str, World]) -> None:
    layout, world = case
    prompts = [world.prompt(100 + number, length) for number, length in enumerate((40, 3, 17, 64, 1, 22))]
    with world.engine(layout, chunked_prefill_size=7) as harness:
        assert finished(harness, world, submit_all(harness, prompts)) == []
        assert harness.scheduler.stats.num_prompt_tokens > 0
        cut = harness.submit(world.prompt(110, 50), params={"max_new_tokens": 4}, dp_rank=0)
        for _ in range(3):
            harness.tick()
        harness.channel.inbox.append(AbortReqInput(rids=[cut]))
        assert finished(harness, world, {cut: 4}) == []
        assert num_rows(harness, cut) == 21  # three chunks, all of them real


def test_retraction_under_memory_pressure(case: tuple[str, World]) -> None:
    layout, world = case
    with world.engine(layout, **SMALL_POOL) as harness:
        prompts = [world.prompt(120 + number, 12) for number in range(5 * harness.num_dp_ranks)]
        wanted = submit_all(harness, prompts, num_new=24)
        assert finished(harness, world, wanted) == []
        retracted = [harness.results[rid].finished.num_retractions for rid in wanted]  # type: ignore[union-attr]
        assert sum(retracted) > 0 and all(s.stats.num_retractions > 0 for s in harness.schedulers)


def test_redundant_experts_in_moved_slots(case: tuple[str, World]) -> None:
    """Ids are logical: no slot has the number of its expert, and there are more slots than experts."""
    layout, world = case
    prompts = [world.prompt(140 + number, length) for number, length in enumerate((40, 3, 17, 1))]
    with world.engine(layout, **world.moved(layout)) as harness:
        placement = harness.scheduler.runner.state.placement
        assert not placement.is_identity and placement.num_physical_experts == EXPERTS + 4
        assert finished(harness, world, submit_all(harness, prompts)) == []


def test_routes_of_random_histories_on_moved_experts_are_right(case: tuple[str, World]) -> None:
    """Random requests, ranks, starts and aborts on moved experts, in small chunks and too little memory."""
    layout, world = case
    random = np.random.default_rng(world.seed)
    wanted: dict[str, int] = {}
    with world.engine(layout, **SMALL_POOL | {"chunked_prefill_size": 7}, **world.moved(layout)) as harness:
        for _ in range(30):
            for _ in range(random.integers(3)):
                length, count = int(random.integers(1, 30)), int(random.integers(1, 20))
                rid = harness.submit(
                    world.prompt(200 + int(random.integers(3)), 30)[:length],
                    params={"max_new_tokens": count},
                    dp_rank=int(random.integers(harness.num_dp_ranks)),
                    return_routed_experts=bool(random.random() < 0.7),
                    routed_experts_start_len=int(random.integers(length + 1)),
                )
                wanted[rid] = count
            if random.random() < 0.15 and wanted:
                harness.channel.inbox.append(AbortReqInput(rids=[str(random.choice(list(wanted)))]))
            harness.tick()
        assert finished(harness, world, wanted) == []
        results = [harness.results[rid].finished for rid in wanted]
        assert any(record.num_retractions for record in results) and any(record.cached_tokens for record in results)  # type: ignore[union-attr]
        assert {record.reason.type for record in results} == {"length", "abort"}  # type: ignore[union-attr]

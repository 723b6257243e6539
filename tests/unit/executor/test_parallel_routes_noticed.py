"""Mistakes that an engine of several ranks could make with its routes, each made once: the comparison must notice.

`test_parallel_routes.py` makes the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture.slot_store import RouteSlotStore
from rollout.control.expert_distribution import gather_step
from rollout.distributed.communicator import Communicator, share_sizes
from rollout.executor.model_runner import ModelRunner, StepRoutes
from rollout.layers.context import SliceRoutes
from rollout.layers.moe.router import TopKRouter
from rollout.scheduler.records import RecordReader
from rollout.scheduler.req import Req
from tests.routes_judge import SMALL_POOL, World, finished, submit_all

pytestmark = pytest.mark.mutant

SEEDS = [3, 4]
BOTH = "dp2 of tp4 all-to-all"  # scattered tokens and data-parallel ranks
Wrong = Callable[[torch.Tensor, Communicator], torch.Tensor]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    return {seed: World(tmp_path_factory.mktemp("routes") / "model", seed) for seed in SEEDS}


# --- wrong gathers ----------------------------------------------------------------------------------------------------


def by_slice(rows_TLK: torch.Tensor, ranks: Communicator) -> list[torch.Tensor]:
    return list(rows_TLK.split(share_sizes(len(rows_TLK), ranks.size)))


def in_another_order(rows_TLK: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Join the slices in reverse order of ranks (wrong)."""
    return torch.cat(by_slice(rows_TLK, ranks)[::-1])


def with_padding(rows_TLK: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Extend slices to equal length for the gather, and leave the padding among the rows (wrong)."""
    longest = max(share_sizes(len(rows_TLK), ranks.size))
    return torch.cat([resized(part, longest) for part in by_slice(rows_TLK, ranks)])[: len(rows_TLK)]


def with_other_sizes(rows_TLK: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Take every slice to have `count // ranks` rows, and the last slice the rest (wrong)."""
    sizes = [len(rows_TLK) // ranks.size] * ranks.size
    sizes[-1] += len(rows_TLK) - sum(sizes)
    return torch.cat([resized(part, size) for part, size in zip(by_slice(rows_TLK, ranks), sizes)])


def own_slice_only(rows_TLK: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """Fill in only the rows of this rank, and gather nothing (wrong)."""
    return torch.cat([part * (rank == ranks.rank) for rank, part in enumerate(by_slice(rows_TLK, ranks))])


def resized(part: torch.Tensor, size: int) -> torch.Tensor:
    """Cut, or filled up with rows of zeros."""
    return torch.cat([part, part.new_zeros(size, *part.shape[1:])])[:size]


def all_kinds(world: World, layout: str) -> list[str]:
    """Run prompts of odd lengths on all ranks, on moved experts, and list the wrong records."""
    with world.engine(layout, **world.moved(layout)) as harness:
        prompts = [world.prompt(300 + number, length) for number, length in enumerate((9, 13, 3, 1))]
        return finished(harness, world, submit_all(harness, prompts))


GATHERS: list[Wrong] = [in_another_order, with_padding, with_other_sizes, own_slice_only]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wrong", GATHERS, ids=lambda gather: gather.__name__)
def test_a_wrong_gather_is_noticed(
    worlds: dict[int, World], seed: int, wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_kinds(worlds[seed], "tp4 all-to-all") == []
    new_slice_routes = ModelRunner._new_slice_routes

    def with_wrong_rows(self: ModelRunner) -> SliceRoutes | None:
        slices = new_slice_routes(self)
        assert slices is not None
        routes = slices.routes
        slices.routes = lambda: wrong(routes(), self.state.model.parallel.attn_tp)  # type: ignore[method-assign]
        return slices

    monkeypatch.setattr(ModelRunner, "_new_slice_routes", with_wrong_rows)
    assert only_routes(all_kinds(worlds[seed], "tp4 all-to-all"))


def only_routes(objections: list[str]) -> bool:
    """Return whether there are objections, all of them to routes."""
    return bool(objections) and all("other routes" in objection for objection in objections)


# --- other mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", ["dp2 of tp4", BOTH])
def test_physical_ids_are_noticed(
    worlds: dict[int, World], seed: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_kinds(worlds[seed], layout) == []
    show = TopKRouter.show

    def physical(self: TopKRouter, logical_ids_TK: torch.Tensor, hooks: Any) -> None:
        show(self, self.placement.logical_to_physical(self.moe_layer, logical_ids_TK), hooks)

    monkeypatch.setattr(TopKRouter, "show", physical)
    assert only_routes(all_kinds(worlds[seed], layout))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", ["dp2 of tp4", BOTH])
def test_routes_of_another_data_parallel_rank_are_noticed(
    worlds: dict[int, World], seed: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong engine joins the rows of all data-parallel ranks, and each rank takes the first of them."""
    assert all_kinds(worlds[seed], layout) == []
    note = ModelRunner._note_routes

    def first_rows(self: ModelRunner, batch: Any, ids_TLK: torch.Tensor) -> StepRoutes:
        everybody, _, _ = gather_step(batch, ids_TLK, self.state.model.parallel.attn_dp)
        return note(self, batch, everybody[: batch.num_tokens])

    monkeypatch.setattr(ModelRunner, "_note_routes", first_rows)
    assert only_routes(all_kinds(worlds[seed], layout))


@pytest.mark.parametrize("layout", ["dp2 of tp4", BOTH])
def test_rows_kept_by_position_are_noticed(
    worlds: dict[int, World], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong engine keeps the rows of a chunk by position in the step, and not in the tokens' own KV slots."""
    world, write = worlds[SEEDS[0]], RouteSlotStore.write
    prompts = [world.prompt(320 + number, length) for number, length in enumerate((30, 25, 8, 40))]

    def by_position(self: RouteSlotStore, slots: torch.Tensor, rows_TLK: torch.Tensor) -> None:
        write(self, torch.arange(len(slots)), rows_TLK)

    for patched in (False, True):
        if patched:
            monkeypatch.setattr(RouteSlotStore, "write", by_position)
        with world.engine(layout, chunked_prefill_size=7) as harness:
            objections = finished(harness, world, submit_all(harness, prompts))
        assert only_routes(objections) if patched else objections == []


@pytest.mark.parametrize("layout", ["dp2 of tp4", BOTH])
def test_rows_that_a_retraction_loses_are_noticed(
    worlds: dict[int, World], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong engine does not record rows that it computes again after a retraction, and saves none."""
    world, rows = worlds[SEEDS[0]], RecordReader._rows
    prompts = [world.prompt(340 + number, 12) for number in range(10)]

    def lost(self: RecordReader, req: Req, *rest: Any) -> Any:
        routes, epochs = rows(self, req, *rest)
        if req.saved_rows is not None:
            routes[: len(req.saved_rows.epochs)] = 0
        return routes, epochs

    monkeypatch.setattr(RecordReader, "_rows", lost)
    with world.engine(layout, **SMALL_POOL) as harness:
        assert only_routes(finished(harness, world, submit_all(harness, prompts, num_new=24)))

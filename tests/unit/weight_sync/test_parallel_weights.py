"""Logical weights on several ranks: every rank holds its part, all of them read the whole, a refresh is one on all.

A tensor that is read as a whole is a call of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from eplb.expert_location import ExpertLocationMetadata
from rollout.core.specs.layer_specs import AttentionSpec, RotarySpec
from rollout.distributed.communicator import Communicator
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.kernels.ops import Ops, plain_ops
from rollout.kernels.places import ShardPlace, ViewPlace
from rollout.layers.shard import Shard, kv_heads, query_heads
from tests.kernels import native_ops
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_engine import MIXED, RankEngine, largest_difference, one_rank
from tests.ranks import run_ranks
from weight_sync.delta.changes import changed, find_changes
from weight_sync.errors import CommitError, WeightSyncError
from weight_sync.fingerprint import combine, fingerprint
from weight_sync.rank_parts import first_rows, share_of
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import Part, Region, TensorMeta
from weight_sync.transaction import WeightTransaction, new_staging

pytestmark = pytest.mark.full

Sizes = tuple[int, int, int]  # ranks of the engine, attention-DP ranks, expert-parallel ranks

LAYOUTS: list[Sizes] = [(2, 1, 1), (2, 1, 2), (2, 2, 2), (4, 1, 1), (4, 2, 2), (4, 1, 4)]
OPS: dict[str, Callable[[], Ops]] = {"plain": plain_ops, "packed": native_ops}
MODES: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")


def layout_of(sizes: Sizes) -> ParallelLayout:
    tp, dp, ep = sizes
    return ParallelLayout(tp, dp, ep, enable_dp_attention=dp > 1)


def located(slots: list[int]) -> ExpertLocationMetadata:
    return ExpertLocationMetadata(torch.tensor([slots, slots[::-1]]), 8)


REDUNDANT = located([7, 2, 5, 0, 3, 6, 1, 4, 2, 5, 7, 0])
MOVED = located([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("weights")
    return (
        tiny_checkpoint(base / "old", "moe_dense_first", 1),
        tiny_checkpoint(base / "new", "moe_dense_first", 2),
    )


def engine(folder: Path, parallel: Parallel, ops: Ops | None = None) -> RankEngine:
    dtype = torch.float32 if ops is not None else torch.float64
    return RankEngine(folder, parallel, metadata=REDUNDANT, dtype=dtype, ops=ops)


def holds(rank: RankEngine, content: dict[str, torch.Tensor]) -> bool:
    """Return whether every place has its part of `content`."""
    weights, right = rank.model.weights, True
    for name, tensor in content.items():
        tensor = tensor.to(rank.model.dtype)
        for place in weights.places(name):
            right &= torch.equal(place.read(), tensor if place.region is None else place.region.of(tensor))
            right &= place.num_bytes == place.read().nbytes
    return right


def shows(transaction: WeightTransaction, sent: dict[str, torch.Tensor], parallel: Parallel) -> bool:
    """Return whether the staged tensors are the tensors sent; all ranks ask together."""
    metas, exchange, right = transaction.weights.metas(), parallel.weight_io.gather_bytes, True
    for name, tensor in sent.items():
        staged = transaction.read_staged(name)
        assert staged is not None
        right &= torch.equal(first_rows(metas[name], staged, tensor.shape[0], exchange), tensor)
    return right


@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_cold_load_fills_every_rank(folders: tuple[Path, Path], sizes: Sizes, layout: str) -> None:
    content, ops = logical_tensors(folders[0]), OPS[layout]()

    def work(parallel: Parallel) -> tuple[bool, int]:
        rank = engine(folders[0], parallel, ops)
        assert rank.model.weights.metas().keys() == content.keys()
        places = [place for name in content for place in rank.model.weights.places(name)]
        return holds(rank, content), sum(place.num_bytes for place in places)

    found = run_ranks(layout_of(sizes), work)
    assert all(right for right, _ in found)
    assert max(size for _, size in found) < sum(tensor.nbytes for tensor in content.values()) * 1.2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(2, 1, 1), (4, 2, 2), (4, 1, 4)])
def test_a_refresh_is_one_on_all_ranks(folders: tuple[Path, Path], sizes: Sizes, mode: StagingMode) -> None:
    new, expected = logical_tensors(folders[1]), one_rank(folders[1], MIXED)

    def work(parallel: Parallel) -> tuple[bool, dict]:
        rank = engine(folders[0], parallel)
        weights, storages = rank.model.weights, [tensor.data_ptr() for tensor in rank.model.tensors()]
        sent = {name: tensor.to(torch.float64) for name, tensor in new.items()}
        transaction = WeightTransaction(weights, "v1", staging=new_staging(weights, mode))
        for name in reversed(sent):
            transaction.receive([(name, sent[name])])
        staged = shows(transaction, sent, parallel)
        transaction.verify()
        staged &= shows(transaction, sent, parallel)
        transaction.commit(parallel.world.all_agree)
        assert storages == [tensor.data_ptr() for tensor in rank.model.tensors()]
        return staged and holds(rank, new), rank.run(MIXED)

    found = run_ranks(layout_of(sizes), work)
    assert all(right for right, _ in found)
    assert largest_difference([results for _, results in found], expected) < 1e-10


@pytest.mark.parametrize("mode", ["host", "device", "journal"])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (4, 2, 2)])
def test_a_lost_vote_puts_every_part_back(folders: tuple[Path, Path], sizes: Sizes, mode: StagingMode) -> None:
    old, new = logical_tensors(folders[0]), logical_tensors(folders[1])

    def work(parallel: Parallel) -> bool:
        rank = engine(folders[0], parallel)
        weights = rank.model.weights
        transaction = WeightTransaction(weights, "v1", staging=new_staging(weights, mode))
        transaction.receive([(name, tensor.to(torch.float64)) for name, tensor in new.items()])
        transaction.verify()
        with pytest.raises(CommitError) as failure:
            transaction.commit(lambda mine: parallel.world.all_agree(mine and parallel.tp.rank != 1))
        assert failure.value.restored
        return holds(rank, old)

    assert all(run_ranks(layout_of(sizes), work))


def test_a_refresh_after_a_move_goes_where_experts_are_now(folders: tuple[Path, Path]) -> None:
    new, expected = logical_tensors(folders[1]), one_rank(folders[1], MIXED)

    def work(parallel: Parallel) -> tuple[bool, dict]:
        rank = engine(folders[0], parallel)
        rank.placement.adopt(MOVED)
        for name, tensor in new.items():
            rank.model.weights.write(name, tensor.to(torch.float64))
        return holds(rank, new), rank.run(MIXED)

    found = run_ranks(layout_of((4, 1, 4)), work)
    assert all(right for right, _ in found)
    assert largest_difference([results for _, results in found], expected) < 1e-10


# --- parts and wholes -------------------------------------------------------------------------------------------------


def assembled(parts: list[tuple[Region | None, float] | None], rows: int = 4) -> list[torch.Tensor]:
    """Return by rank the first rows of a tensor [4, 6].

    Rank r holds `parts[r]` of it: a region full of one number, or nothing.
    """

    def work(parallel: Parallel) -> torch.Tensor:
        ranks: Communicator = parallel.weight_io
        part, content = parts[ranks.rank], None
        if part is not None:
            region, value = part
            whole = torch.full((4, 6), value, dtype=torch.bfloat16)
            content = whole if region is None else region.of(whole)
        meta = TensorMeta("w", torch.bfloat16, (4, 6))
        return first_rows(meta, [] if part is None else [Part(part[0], content)], rows, ranks.gather_bytes)

    return run_ranks(ParallelLayout(len(parts)), work)


def test_a_whole_from_parts_the_first_holder_of_each_counting() -> None:
    left, right = Region(1, 0, 4), Region(1, 4, 2)
    for found in assembled([None, (right, 2.0), (left, 1.0), (right, 9.0)]):
        assert found.tolist() == [[1, 1, 1, 1, 2, 2]] * 4
    for found in assembled([(left, 1.0), (None, 3.0), None]):
        assert found.tolist() == [[3] * 6] * 4
    upper, lower = Region(0, 0, 3), Region(0, 3, 1)
    for rows in (0, 2, 3, 4, 9):
        for found in assembled([(lower, 2.0), (upper, 1.0)], rows):
            assert found.tolist() == ([[1] * 6] * 3 + [[2] * 6])[:rows]


@pytest.mark.parametrize(
    "parts",
    [
        [None, None],
        [(Region(0, 0, 3), 1.0), None],
        [(Region(0, 1, 3), 1.0), (Region(0, 1, 3), 1.0)],
        [(Region(0, 0, 2), 1.0), (Region(0, 1, 3), 1.0)],
        [(Region(0, 0, 4), 1.0), (Region(1, 0, 2), 1.0)],
    ],
)
def test_a_part_that_no_rank_holds_is_an_error_on_all(parts: list) -> None:
    with pytest.raises(WeightSyncError, match="w: "):
        assembled(parts)


def test_a_shard_takes_its_part_of_the_whole_and_gives_it_back() -> None:
    whole = torch.arange(24.0).view(4, 6)
    for dim, start, length in ((0, 1, 2), (1, 4, 2)):
        storage = torch.zeros(whole.narrow(dim, start, length).shape)
        place = ShardPlace(ViewPlace(storage), dim, start, length)
        place.write(whole)
        assert torch.equal(storage, whole.narrow(dim, start, length))
        elsewhere = place.rebind(torch.zeros_like(storage))
        elsewhere.restore(place.read())
        assert torch.equal(elsewhere.read(), storage)
        assert (elsewhere.num_bytes, elsewhere.region) == (storage.nbytes, Region(dim, start, length))
        assert place.storage is storage


SECTIONS = [
    (1, (4, 2), [Region(1, 0, 3, (4, 2)), Region(1, 3, 3, (4, 2))]),
    (0, (8, 4, 12), [Region(0, 6 * rank, 6, (8, 4, 12)) for rank in range(4)]),
]


@pytest.mark.parametrize(("dim", "sections", "regions"), SECTIONS, ids=["columns", "rows"])
def test_a_share_of_every_section(dim: int, sections: tuple[int, ...], regions: list[Region]) -> None:
    """Each rank holds its shares of all sections side by side; together they are the whole, with its fingerprint."""
    shape = (4, 6) if dim else (24, 3)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    shares = [part.chunk(len(regions), dim) for part in whole.split(sections, dim)]
    meta = TensorMeta("w", torch.float32, shape)
    parts = []
    for region, *mine in zip(regions, *shares, strict=True):
        assert torch.equal(region.of(whole), torch.cat(mine, dim))
        storage = torch.zeros(region.of(whole).shape)
        place = ShardPlace(ViewPlace(storage), dim, region.start, region.length, region.sections)
        place.write(whole)
        assert torch.equal(place.rebind(storage).read(), torch.cat(mine, dim)) and place.region == region
        parts.append(Part(region, place.read()))
    assert combine(*(share_of(meta, part) for part in parts)) == fingerprint(whole)
    for count in (0, 1, 4, 9, 99):
        work = partial(_first_rows, meta, parts, count)
        for found in run_ranks(ParallelLayout(len(parts)), work):
            assert torch.equal(found, whole[:count])


def _first_rows(meta: TensorMeta, parts: list[Part], count: int, parallel: Parallel) -> torch.Tensor:
    ranks: Communicator = parallel.weight_io
    return first_rows(meta, parts[ranks.rank :][:1], count, ranks.gather_bytes)


@pytest.mark.parametrize(("dim", "sections", "regions"), SECTIONS, ids=["columns", "rows"])
def test_changes_within_a_share_of_every_section(dim: int, sections: tuple[int, ...], regions: list[Region]) -> None:
    old = torch.randn((4, 6) if dim else (24, 3), generator=torch.Generator().manual_seed(0))
    new = torch.where(torch.rand(old.shape, generator=torch.Generator().manual_seed(1)) < 0.4, old + 1, old)
    changes, seen = find_changes(old, new), []
    for region in regions:
        mine, indices_N = changes.within(old.shape, region)
        assert (np.diff(mine.positions_N) > 0).all()
        assert torch.equal(changed(region.of(old).contiguous(), mine), region.of(new))
        seen += indices_N.tolist()
    assert sorted(seen) == changes.positions_N.tolist()


@pytest.mark.mutant
def test_a_share_of_another_section_is_noticed() -> None:
    whole = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    meta, right = TensorMeta("w", torch.float32, (24, 3)), Region(0, 6, 6, (8, 4, 12))
    wrong = share_of(meta, Part(replace(right, sections=(8, 8, 8)), right.of(whole)))
    assert wrong != share_of(meta, Part(right, right.of(whole)))


# --- who has which heads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv"), [(8, 8), (8, 4), (8, 2), (8, 1), (16, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_rank_has_the_key_value_heads_that_its_queries_read(heads: int, kv: int, ranks: int) -> None:
    rotary = RotarySpec(dim=8, theta=10000.0)
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv, head_dim=8, rotary=rotary)
    layout = ParallelLayout(ranks)
    seen = []
    for rank in range(ranks):
        parallel = Parallel(layout, layout.position(rank))
        queries, keys = query_heads(spec, parallel), kv_heads(spec, parallel)
        per_key = queries.length // keys.length
        for local in range(queries.length):
            assert (queries.start + local) // (heads // kv) == keys.start + local // per_key
        seen += range(queries.start, queries.start + queries.length)
    assert seen == list(range(heads))


def test_even_shards_cover_the_whole_dimension() -> None:
    for total, parts in ((320, 3), (7, 4), (4, 4)):
        shards = [Shard.even(total, rank, parts) for rank in range(parts)]
        assert [shard.start for shard in shards] == [sum(s.length for s in shards[:i]) for i in range(parts)]
        assert sum(shard.length for shard in shards) == total
    assert Shard(8, 2, 3).times(4) == Shard(32, 8, 12)

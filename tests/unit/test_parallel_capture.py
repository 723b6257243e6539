"""What a step costs in collectives, by layout; and routes of scattered tokens, gathered once for all layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.model_executor import model_runner
from rollout.model_executor.route_gather import gather_routes
from tests.model_zoo import tiny_checkpoint
from tests.parallel_engine import MIXED, RankEngine, Step, largest_difference, one_rank, several_ranks
from tests.ranks import run_ranks

Sizes = tuple[int, int, int]  # ranks of the engine, attention-DP ranks, expert-parallel ranks


def layout_of(sizes: Sizes) -> ParallelLayout:
    tp, dp, ep = sizes
    return ParallelLayout(tp, dp, ep, enable_dp_attention=dp > 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dense layer, then three sparse ones; an output head of its own."""
    return tiny_checkpoint(tmp_path_factory.mktemp("capture") / "model", "moe_dense_first", 2, layers=4)


# Of one forward of at most 64 KiB a sum, logits left out: two in the dense layer, and for each of three sparse layers
#   none          attention's sum and the experts' sum; with DP attention, a gather there and an exchange back
#   all_to_all    counts, there, back; where tokens are shared, a scatter of attention's sum and a gather at the end
PER_FORWARD = {
    ("none", (2, 1, 1)): {"all_gather": 2 + 3 * 2},
    ("none", (2, 1, 2)): {"all_gather": 2 + 3 * 2},
    ("none", (4, 1, 2)): {"all_gather": 2 + 3 * 2},
    ("none", (2, 2, 2)): {"all_gather": 3, "all_to_all": 3},
    ("none", (4, 2, 2)): {"all_gather": 2 + 3 * 2, "all_to_all": 3},
    ("all_to_all", (2, 2, 2)): {"all_gather": 3, "all_to_all": 2 * 3},
    ("all_to_all", (2, 1, 2)): {"all_gather": 2 + 3 * 2, "all_to_all": 3 * 3},
    ("all_to_all", (4, 2, 4)): {"all_gather": 2 + 3 * 2, "all_to_all": 3 * 3},
}


def collectives(parallel: Parallel) -> dict[str, int]:
    total: dict[str, int] = {}
    for communicator in parallel.communicators:
        for verb, count in communicator.counts.items():
            total[verb] = total.get(verb, 0) + count.calls
    return total


def count_forward(folder: Path, parallel: Parallel, backend: str, *, captures: bool) -> dict[str, int]:
    engine = RankEngine(folder, parallel, backend)
    if not captures:
        engine.runner.recorder = None
    size = parallel.layout.attn_dp_size
    tokens = Step({request: [3, 1, 4, 1, 5] for request in range(size)})
    mine = tokens.part(parallel.position.attn_dp_rank, size)
    batch = engine.harness.batch(mine.extends, {})
    batch.global_num_tokens = [5] * size if size > 1 else None
    for communicator in parallel.communicators:
        communicator.reset_counts()
    engine.runner.forward(batch)
    return collectives(parallel)


@pytest.mark.parametrize(("backend", "sizes"), list(PER_FORWARD))
def test_collectives_of_a_forward(folder: Path, backend: str, sizes: Sizes) -> None:
    expected = PER_FORWARD[backend, sizes]
    without = run_ranks(layout_of(sizes), lambda parallel: count_forward(folder, parallel, backend, captures=False))
    assert without == [expected] * sizes[0]
    captured = run_ranks(layout_of(sizes), lambda parallel: count_forward(folder, parallel, backend, captures=True))
    scatters = backend == "all_to_all" and sizes[0] > sizes[1]
    one_more = {**expected, "all_gather": expected["all_gather"] + int(scatters)}
    assert captured == [one_more] * sizes[0]


@pytest.mark.parametrize(("num_experts", "bytes_each"), [(256, 1), (257, 2), (40_000, 4)])
def test_gathered_routes_are_narrow_and_in_the_order_of_the_batch(num_experts: int, bytes_each: int) -> None:
    whole_TLK = torch.randint(num_experts, (5, 3, 2), generator=torch.Generator().manual_seed(0))
    whole_TLK[0, 0, 0] = num_experts - 1

    def work(parallel: Parallel) -> int:
        ranks = parallel.attn_tp
        mine = whole_TLK.split({2: [3, 2], 3: [2, 2, 1]}[ranks.size])[ranks.rank]
        found = gather_routes(list(mine.unbind(1)), 5, num_experts, ranks)
        assert torch.equal(torch.stack(list(found), 1), whole_TLK)
        assert found[0].dtype == torch.int64
        assert ranks.counts["all_gather"].calls == 1
        return ranks.counts["all_gather"].num_bytes

    row = 3 * 2 * bytes_each
    assert run_ranks(ParallelLayout(2), work) == [3 * row] * 2
    assert run_ranks(ParallelLayout(3), work) == [2 * 2 * row] * 3


def test_a_wrong_order_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = one_rank(folder, MIXED)

    def is_right() -> bool:
        try:
            found = several_ranks(folder, layout_of((2, 1, 2)), MIXED, moe_a2a_backend="all_to_all")
            return largest_difference(found, expected) < 1e-10
        except AssertionError:
            return False

    assert is_right()

    def turned_round(ids_by_layer: list, num_tokens: int, num_experts: int, ranks: object) -> list[torch.Tensor]:
        found = gather_routes(ids_by_layer, num_tokens, num_experts, ranks)  # type: ignore[arg-type]
        return [ids_TK.flip(0) for ids_TK in found]

    monkeypatch.setattr(model_runner, "gather_routes", turned_round)
    assert not is_right()

"""The cost of a step in collectives, by layout; and routes of scattered tokens, which cost none of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from capture.capturer import RoutedExpertsCapturer
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.executor import model_runner
from rollout.layers.context import SliceRoutes
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
        engine.runner.route_store = None
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
    assert captured == [expected] * sizes[0]  # scattered routes travel with the slices of the last layer


@pytest.mark.parametrize(("num_experts", "bytes_each"), [(256, 1), (257, 2), (40_000, 4)])
def test_routes_travel_narrow_and_only_with_the_last_layer(num_experts: int, bytes_each: int) -> None:
    ids_LtK = torch.randint(num_experts, (3, 5, 2), generator=torch.Generator().manual_seed(0))
    ids_LtK[0, 0, 0] = num_experts - 1
    capturer = RoutedExpertsCapturer(3, 2, num_experts)
    capturer.begin_step(5)
    slices = SliceRoutes(capturer)
    for layer in range(2):
        capturer.record(layer, ids_LtK[layer])
        assert slices.to_send(layer) is None
    capturer.record(2, ids_LtK[2])
    rows_tn = slices.to_send(2)
    assert rows_tn is not None and rows_tn.shape == (5, 3 * 2) and rows_tn.dtype.itemsize == bytes_each
    slices.receive(torch.cat([rows_tn, rows_tn.flip(0)]))  # of two ranks
    found = slices.routes()
    assert torch.equal(found.transpose(0, 1), torch.cat([ids_LtK, ids_LtK.flip(1)], dim=1))


@pytest.mark.mutant
def test_a_wrong_order_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = one_rank(folder, MIXED)

    def is_right() -> bool:
        try:
            found = several_ranks(folder, layout_of((2, 1, 2)), MIXED, moe_a2a_backend="all_to_all")
            return largest_difference(found, expected) < 1e-10
        except AssertionError:
            return False

    assert is_right()

    class TurnedRound(SliceRoutes):
        """A wrong capturer: the last token comes first."""

        def routes(self) -> torch.Tensor:
            return super().routes().flip(0)

    monkeypatch.setattr(model_runner, "SliceRoutes", TurnedRound)
    assert not is_right()

"""A model on several ranks gives the hidden states, logits and routes of the same model on one rank.

Mixed batches of prefills, chunks and decodes, idle data-parallel ranks, one token in all; over a KV pool for each rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eplb.expert_location import ExpertLocationMetadata
from eplb.placement import ExpertPlacement
from rollout.core.errors import StartupError
from rollout.distributed.layout import ParallelLayout
from rollout.layers import attention
from rollout.layers.moe.dispatchers.all_tokens import AllTokensDispatcher
from rollout.layers.moe.router import TopKRouter
from rollout.layers.shard import Shard
from tests.kernels import native_ops
from tests.model_zoo import tiny_checkpoint
from tests.parallel_engine import MIXED, RankEngine, largest_difference, one_rank, run_script, several_ranks
from tests.rank_processes import run_rank_processes
from tests.ranks import run_ranks
from tests.row_ops import row_ops

Sizes = tuple[int, int, int]  # ranks of the engine, attention-DP ranks, expert-parallel ranks

# The tiny models have 4 query and 2 key-value heads, 8 experts, 3 chosen.
GRID: list[tuple[str, Sizes]] = [
    *[("none", sizes) for sizes in ((2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2))],
    *[("none", sizes) for sizes in ((4, 1, 1), (4, 1, 2), (4, 1, 4))],
    *[("none", sizes) for sizes in ((4, 2, 1), (4, 2, 2), (4, 2, 4), (4, 4, 1), (4, 4, 4))],
    *[("all_to_all", sizes) for sizes in ((1, 1, 1), (2, 1, 2), (2, 2, 2), (4, 1, 4), (4, 2, 4), (4, 4, 4))],
]
# Of a model with 16 query and 4 key-value heads, 32 experts, 3 chosen.
LARGE: list[tuple[str, Sizes]] = [
    *[("none", sizes) for sizes in ((16, 1, 1), (16, 1, 4), (16, 4, 4), (16, 4, 16), (64, 16, 16))],
    *[("all_to_all", sizes) for sizes in ((16, 1, 16), (16, 4, 16), (16, 16, 16), (32, 32, 32))],
]
SHARES_NO_TOKENS: list[Sizes] = [(2, 2, 2), (4, 4, 4)]


def layout_of(sizes: Sizes) -> ParallelLayout:
    tp, dp, ep = sizes
    return ParallelLayout(tp, dp, ep, enable_dp_attention=dp > 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("parallel")
    return {kind: tiny_checkpoint(base / kind, kind, 1) for kind in ("moe_dense_first", "moe", "dense")}


def redundant(num_layers: int) -> ExpertLocationMetadata:
    """Return maps of 8 experts to 12 slots, another in each layer; of 1, 2 or 4 ranks none holds an expert twice."""
    row = torch.tensor([7, 2, 5, 0, 3, 6, 1, 4, 2, 5, 7, 0])
    return ExpertLocationMetadata(torch.stack([(row + layer) % 8 for layer in range(num_layers)]), 8)


@pytest.mark.full(
    but=("none-sizes0", "none-sizes4", "none-sizes10-moe", "all_to_all-sizes15", "all_to_all-sizes17-moe")
)
@pytest.mark.parametrize("kind", ["moe_dense_first", "moe"])
@pytest.mark.parametrize(("backend", "sizes"), GRID)
def test_a_layout_changes_no_result(folders: dict[str, Path], kind: str, backend: str, sizes: Sizes) -> None:
    expected = one_rank(folders[kind], MIXED)
    found = several_ranks(folders[kind], layout_of(sizes), MIXED, moe_a2a_backend=backend)
    assert largest_difference(found, expected) < 1e-10


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "model"
    return tiny_checkpoint(folder, "moe_dense_first", 1, heads=16, kv_heads=4, experts=32)


@pytest.mark.full(but=("none-sizes3", "all_to_all-sizes6"))
@pytest.mark.parametrize(("backend", "sizes"), LARGE)
def test_a_large_layout_changes_no_result(wide_folder: Path, backend: str, sizes: Sizes) -> None:
    """Each rank is a process."""
    found = run_rank_processes(layout_of(sizes), run_script, wide_folder, MIXED, backend)
    assert largest_difference(found, one_rank(wide_folder, MIXED)) < 1e-10


@pytest.mark.parametrize("sizes", [(2, 1, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1)])
def test_a_dense_model_gives_the_same_on_several_ranks(folders: dict[str, Path], sizes: Sizes) -> None:
    found = several_ranks(folders["dense"], layout_of(sizes), MIXED)
    assert largest_difference(found, one_rank(folders["dense"], MIXED)) < 1e-10


@pytest.mark.full(but=("none-sizes2", "all_to_all-sizes10"))
@pytest.mark.parametrize(("backend", "sizes"), [item for item in GRID if item[1][2] > 1])
def test_redundant_experts_change_no_result(folders: dict[str, Path], backend: str, sizes: Sizes) -> None:
    folder = folders["moe_dense_first"]
    found = several_ranks(folder, layout_of(sizes), MIXED, moe_a2a_backend=backend, metadata=redundant(2))
    assert largest_difference(found, one_rank(folder, MIXED)) < 1e-10


# --- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SHARES_NO_TOKENS)
@pytest.mark.parametrize("placed", ["trivial", "redundant"])
def test_where_sums_keep_their_order_float64_is_equal_to_the_bit(
    folders: dict[str, Path], sizes: Sizes, placed: str
) -> None:
    """Both run the same batches: attention in plain torch sees which requests are together."""
    folder, metadata = folders["moe_dense_first"], redundant(2) if placed == "redundant" else None
    expected = one_rank(folder, MIXED, batches_of=sizes[1], ops=row_ops())
    found = several_ranks(
        folder, layout_of(sizes), MIXED, moe_a2a_backend="all_to_all", ops=row_ops(), metadata=metadata
    )
    assert largest_difference(found, expected) == 0.0


@pytest.mark.parametrize("sizes", SHARES_NO_TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_operators_give_the_bits_of_one_rank(
    folders: dict[str, Path], sizes: Sizes, dtype: torch.dtype
) -> None:
    """The batches of the requests do not matter, on one rank or on several that send tokens to whole experts."""
    native = {"dtype": dtype, "ops": native_ops(), "attention": "native_cpu"}
    folder = folders["moe_dense_first"]
    found = several_ranks(folder, layout_of(sizes), MIXED, moe_a2a_backend="all_to_all", **native)
    assert largest_difference(found, one_rank(folder, MIXED, **native)) == 0.0


@pytest.mark.parametrize(("backend", "sizes"), [("none", (4, 2, 2)), ("none", (2, 1, 1)), ("all_to_all", (4, 1, 4))])
def test_compiled_operators_in_float32(folders: dict[str, Path], backend: str, sizes: Sizes) -> None:
    """Parts are added in another order than on one rank: 2e-5 on hidden states and logits of about 1 to 8."""
    native = {"dtype": torch.float32, "ops": native_ops(), "attention": "native_cpu"}
    folder = folders["moe_dense_first"]
    found = several_ranks(folder, layout_of(sizes), MIXED, moe_a2a_backend=backend, **native)
    assert 0.0 < largest_difference(found, one_rank(folder, MIXED, **native)) < 2e-5


# --- models that forgot something -------------------------------------------------------------------------------------


class Judge:
    """The comparison with the results of one rank, computed before the engine was broken."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._expected = folder, one_rank(folder, MIXED)

    def __call__(self, sizes: Sizes) -> bool:
        try:
            found = several_ranks(self._folder, layout_of(sizes), MIXED, metadata=redundant(2))
            return largest_difference(found, self._expected) < 1e-10
        except AssertionError:
            return False


@pytest.fixture(scope="module")
def is_right(folders: dict[str, Path]) -> Judge:
    return Judge(folders["moe_dense_first"])


@pytest.mark.mutant
def test_physical_ids_shown_to_hooks_are_caught(is_right: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_right((2, 1, 2))

    def show_physical(self: TopKRouter, logical_ids_TK: torch.Tensor, hooks: list) -> None:
        for hook in hooks:
            hook(self.moe_layer, self.placement.logical_to_physical(self.moe_layer, logical_ids_TK))

    monkeypatch.setattr(TopKRouter, "show", show_physical)
    assert not is_right((2, 1, 2))


@pytest.mark.mutant
def test_a_replica_picked_by_each_rank_for_itself_is_caught(is_right: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ExpertPlacement.logical_to_physical

    def by_rank(self: ExpertPlacement, layer: int, ids_TK: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        return right(self, layer, ids_TK, first_row + self.ep_rank)

    monkeypatch.setattr(ExpertPlacement, "logical_to_physical", by_rank)
    assert not is_right((4, 1, 4)), "an expert is computed by two ranks, or by none"
    assert is_right((4, 4, 4)), "ranks that share no tokens may pick as they like"


@pytest.mark.mutant
def test_parts_of_experts_that_are_not_added_up_are_caught(is_right: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_right((2, 1, 1))
    monkeypatch.setattr(AllTokensDispatcher, "combine", lambda self, expert_out, handle: expert_out)
    assert not is_right((2, 1, 1))


@pytest.mark.mutant
def test_the_wrong_one_of_shared_key_value_heads_is_caught(is_right: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.kv_heads
    assert is_right((4, 1, 1))

    def next_head(config: object, parallel: object) -> Shard:
        shard = right(config, parallel)  # type: ignore[arg-type]
        if parallel.position.attn_tp_rank != 1:  # type: ignore[attr-defined]
            return shard
        return Shard(shard.total, shard.start + 1, shard.length)

    monkeypatch.setattr(attention, "kv_heads", next_head)
    assert not is_right((4, 1, 1))


# --- sizes that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "overrides", "line"),
    [
        (
            (3, 1, 1),
            {"intermediate_size": 66, "moe_intermediate_size": 33},
            r"--tp-size 3: attention heads: 4 does not divide over 3 ranks",
        ),
        ((4, 1, 1), {"heads": 12, "kv_heads": 3}, r"--tp-size 4: key-value heads: 3 .* 4 ranks"),
        ((4, 2, 4), {"heads": 9, "kv_heads": 3}, r"--tp-size 4 --dp-size 2: attention heads: 9"),
        ((4, 1, 4), {"intermediate_size": 62}, r"--tp-size 4: intermediate size of the dense layers: 62"),
        ((4, 1, 2), {"moe_intermediate_size": 33}, r"--tp-size 4 --ep-size 2: intermediate size of the experts: 33"),
    ],
)
def test_sizes_that_do_not_divide(tmp_path: Path, sizes: Sizes, overrides: dict[str, int], line: str) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe_dense_first", 0, **overrides)
    with pytest.raises(StartupError, match=line):
        run_ranks(layout_of(sizes), lambda parallel: RankEngine(folder, parallel))

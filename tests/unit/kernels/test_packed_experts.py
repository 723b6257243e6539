"""Experts of rows that lie by expert, interpreted, against the same rows in slots: the same bits with any tiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import interpreted  # before any kernel

# isort: split
from eplb.expert_location import ExpertLocationMetadata
from eplb.placement import ExpertPlacement
from rollout.core.specs.layer_specs import MoESpec, RouterSpec
from rollout.distributed.parallel import Parallel
from rollout.kernels.gpu import fused_experts, packed_experts
from rollout.kernels.ops import plain_ops
from rollout.layers.build import Build
from rollout.layers.moe.dispatchers.base import DispatchOutput, PackedRows
from rollout.layers.moe.experts import Experts
from tests.gpu_expert_cases import Case, draw

PLACES = 20
COUNTS = {"ragged": (3, 0, 17, 1), "none": (0, 0, 0, 0), "full": (20, 20, 20, 20), "one expert": (0, 0, 0, 20)}
EXPECTED = (1, 200, 100_000)  # rows: the tiles for few, some and many


def drawn(counts: tuple[int, ...], clamped: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    """Draw rows by expert; places without a row hold no numbers."""
    ids = PackedRows(torch.tensor(counts, dtype=torch.int32)).local_ids(PLACES * len(counts))
    case = draw(len(ids), 1, dtype, experts=len(counts), clamped=clamped, weighted=False)
    return replace(case, ids=ids, hidden=case.hidden.masked_fill(ids < 0, torch.nan))


def packed(case: Case, counts: tuple[int, ...], expected: int, module: Any = packed_experts) -> torch.Tensor:
    """Return the outputs of the rows, one after the other."""
    hidden = case.hidden.view(len(counts), PLACES, -1)
    rest = case.w13, case.w2, case.w13_bias, case.w2_bias, case.limit, case.alpha
    out = module.packed_experts(hidden, torch.tensor(counts, dtype=torch.int32), expected, *rest)
    return out.flatten(0, 1)[case.ids[:, 0] >= 0]


@pytest.mark.parametrize("expected", EXPECTED)
@pytest.mark.parametrize("name", COUNTS)
def test_rows_by_expert_have_the_bits_of_rows_in_slots(name: str, expected: int) -> None:
    case = drawn(COUNTS[name], clamped=name == "ragged")
    wanted = fused_experts.fused_experts(*case.arguments())[case.ids >= 0]  # type: ignore[arg-type]
    assert torch.equal(packed(case, COUNTS[name], expected), wanted)


def test_rows_by_expert_agree_with_the_plain_formula() -> None:
    case = drawn(COUNTS["ragged"], clamped=True)
    filled = case.ids[:, 0] >= 0
    assert case.rows(filled).is_right(packed(case, COUNTS["ragged"], 21).unsqueeze(1))


def test_a_layer_takes_packed_rows_with_and_without_the_kernel() -> None:
    counts = torch.tensor(COUNTS["ragged"], dtype=torch.int32)
    case, found = drawn(COUNTS["ragged"]), []
    for ops in (plain_ops(), interpreted.interpreted_ops()):
        build = Build(ops, torch.float32, "cpu", Parallel())
        placement = ExpertPlacement(ExpertLocationMetadata(torch.arange(4).unsqueeze(0), 4))
        layer = Experts(MoESpec(router=RouterSpec(num_experts=4, top_k=1), inner=40), 72, 0, placement, build)
        layer.w13.copy_(case.w13)
        layer.w2.copy_(case.w2)
        rows = case.hidden.masked_fill(case.ids < 0, 0.0)
        work = DispatchOutput(rows, None, None, None, has_holes=True, packed=PackedRows(counts), expected=21)
        out = layer(work)
        assert out.shape == (4 * PLACES, 1, 72)
        found.append(out[case.ids >= 0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("place = expert * N", "place = expert * BLOCK_M"),
        ("first = (block - first_block) * BLOCK_M", "first = 0 * block"),
    ],
)
def test_wrong_plans_of_packed_rows_are_caught(old: str, new: str, tmp_path: Path) -> None:
    wrong = interpreted.mutated(packed_experts, tmp_path, (old, new))
    case = drawn(COUNTS["ragged"])
    found = packed(case, COUNTS["ragged"], 1, wrong)
    assert not torch.equal(found, packed(case, COUNTS["ragged"], 1))

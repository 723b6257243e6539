"""The expert kernels of the GPU path, interpreted on the CPU, and `grouped_mm` without a look at the routes.

The reference is float64, one assignment after the other.  bfloat16 is left out, which triton's interpreter computes
wrongly.  numpy computes the interpreted products: tests of bits judge which sums there are, and not the tensor cores.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from rollout.kernels.gpu import experts_kernels, experts_plan
from rollout.kernels.gpu import fused_experts as experts
from rollout.kernels.gpu.experts_grouped import grouped_experts
from rollout.kernels.gpu.experts_plan import EXPERT_TILES, Tiles, choose_implementation, choose_tiles, max_blocks
from rollout.kernels.ops import RowMajorHeld, gpu_ops, plain_ops
from rollout.kernels.row_places import ROW_FORMS
from rollout.layers.build import Build
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.layers.moe.experts import Experts
from tests.gpu_expert_cases import TOLERANCE, Case, draw, with_empty_slots
from tests.held_reference import held_of
from tests.kernels import rows_are_independent

ROOT = Path(__file__).resolve().parents[3]
HALF, FLOAT = torch.float16, torch.float32
SHARED_BYTES = 227 * 1024  # that a block may have on an H100 or H200
COMPILE_TIMEOUT_S = 1200.0


def run(case: Case) -> torch.Tensor:
    return experts.fused_experts(*case.arguments())  # type: ignore[arg-type]


def plan_all(patch: pytest.MonkeyPatch) -> None:
    """Have few assignments planned, too."""
    patch.setattr(experts, "few_assignments", lambda _: 0)


CASES = {
    "no tokens": lambda dtype: draw(0, dtype=dtype),
    "one token": lambda dtype: draw(1, dtype=dtype),
    "a few": lambda dtype: draw(3, top_k=1, dtype=dtype, weighted=False),
    "biases and clamps": lambda dtype: draw(5, dtype=dtype, clamped=True),
    "empty slots": lambda dtype: with_empty_slots(draw(6, dtype=dtype, clamped=True), (-1, 4, -7)),
    "all to one expert": lambda dtype: replace(draw(17, dtype=dtype), ids=torch.full((17, 2), 2)),
    "the last expert only": lambda dtype: replace(draw(2, dtype=dtype, weighted=False), ids=torch.full((2, 2), 3)),
    "odd sizes": lambda dtype: draw(3, top_k=3, dtype=dtype, hidden=37, inner=19, clamped=True),
    "whole tiles": lambda dtype: draw(3, dtype=dtype, hidden=128, inner=64),
    "more slots than experts": lambda dtype: draw(17, top_k=8, dtype=dtype),
    "many tokens": lambda dtype: draw(65, top_k=3, dtype=dtype, experts=5),
    "many experts": lambda dtype: draw(9, top_k=4, dtype=dtype, experts=40, hidden=40, inner=24),
    "all empty": lambda dtype: replace(draw(4, dtype=dtype), ids=torch.full((4, 2), -1)),
    "unweighted, empty slots": lambda dtype: with_empty_slots(
        draw(7, dtype=dtype, clamped=True, weighted=False), (-1, 4)
    ),
}
GATE = (
    "no tokens",
    "biases and clamps",
    "empty slots",
    "all to one expert",
    "odd sizes",
    "unweighted, empty slots",
)
OTHERS = [name for name in CASES if name not in GATE]


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("name", [*GATE, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_it_agrees_with_the_plain_formula(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most cases are small enough to need no plan; with one they have the same bits."""
    case = CASES[name](dtype)
    found = run(case)
    assert case.error(found) < TOLERANCE[dtype]
    plan_all(monkeypatch)
    assert torch.equal(run(case), found)


@pytest.mark.full
@pytest.mark.parametrize("tiles", [tiles for _, tiles in EXPERT_TILES[2]], ids=str)
def test_all_sizes_of_tiles_agree_with_float64(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "choose_tiles", lambda *_: tiles)
    case = with_empty_slots(draw(40, dtype=HALF, clamped=True, hidden=136, inner=72))
    assert case.error(run(case)) < TOLERANCE[HALF]


def test_an_outcome_that_is_no_number_stays_one() -> None:
    case = draw(4, clamped=True, weighted=False)
    case.hidden[1, 3] = float("nan")
    out = run(case)
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


# Which sums there are.


@pytest.mark.full
def test_rows_have_the_same_bits_in_every_batch() -> None:
    case = with_empty_slots(draw(20, top_k=3, clamped=True))
    assert rows_are_independent(lambda index: run(case.rows(index)), 20)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    case = draw(24, top_k=3)
    whole = run(case)
    for index in (torch.tensor([5]), torch.tensor([23, 0, 7]), torch.arange(17)):
        assert torch.equal(run(case.rows(index)), whole[index])


@pytest.mark.mutant
def test_a_step_of_the_depth_that_depends_on_the_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(24, top_k=3)
    whole = run(case)
    monkeypatch.setattr(experts, "depth_step", lambda _: 16)
    assert not torch.equal(run(case.rows(torch.arange(17))), whole[:17])


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["float32", "float16"])
def test_products_are_rounded_and_added_in_slot_order(dtype: torch.dtype) -> None:
    assert _adds_up(dtype)


def _adds_up(dtype: torch.dtype) -> bool:
    case = draw(5, top_k=4, dtype=dtype)
    assert case.weights is not None
    by_slot = run(replace(case, weights=None))
    total = torch.zeros(by_slot.shape[0], by_slot.shape[2])
    for slot in range(4):
        total += (by_slot[:, slot] * case.weights[:, slot, None]).float()
    return torch.equal(run(case), total.to(dtype))


@pytest.mark.parametrize("chunk", [4, 64])
def test_the_plan_holds_every_assignment_once_in_its_expert_and_order(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "plan_chunk", lambda _: chunk)
    plan_all(monkeypatch)
    ids = torch.randint(-1, 6, (21,), generator=torch.Generator().manual_seed(1))  # 5 is no expert
    ids[ids == 3] = 2
    order_A, table_N3, num_blocks, few, *_ = experts._plan(ids.view(7, 3), 5, Tiles(4, 64, 4, 3))
    assert table_N3 is not None and table_N3.shape[0] == num_blocks == max_blocks(21, 5, 4) and not few
    found: dict[int, list[int]] = {expert: [] for expert in range(5)}
    for expert, first, count in table_N3.tolist():
        assert count <= 4
        if count:
            found[expert] += order_A[first : first + count].tolist()
    assert found == {expert: (ids == expert).nonzero()[:, 0].tolist() for expert in range(5)}


def test_the_worst_routing_fits_the_plan() -> None:
    """Each of some experts has one assignment more than whole blocks; more experts than assignments."""
    for counts, tokens in (([5] * 7, 4), ([1, 0, 0, 0, 1], 16), ([17, 1, 1], 16), ([1] * 3 + [0] * 9, 128)):
        needed = sum(-(-count // tokens) for count in counts)
        assert needed <= max_blocks(sum(counts), len(counts), tokens)
    assert max_blocks(35, 7, 4) == 15 and max_blocks(8, 128, 16) == 8


# Wrong kernels.

WRONG: dict[str, tuple[tuple[str, str], ...]] = {
    "up for gate": (("    gate, up = tl.split(", "    up, gate = tl.split("),),
    "weights before rounding": (("_rounded(out * weight, dtype), 0.0)", "out * weight, 0.0)"),),
    "slots from the last one on": (("assignment = token * K + slot", "assignment = token * K + K - 1 - slot"),),
    "a block goes on in the next expert": (
        ("tl.minimum(end - first, BLOCK_M)", "tl.minimum(num_assignments - first, BLOCK_M)"),
    ),
    "a last part of a block is forgotten": (
        (
            "last_block = first_block + (count + BLOCK_M - 1) // BLOCK_M",
            "last_block = first_block + count // BLOCK_M",
        ),
    ),
    "blocks that are left over have places": ((" + 2, 0, mask=start", " + 2, 1, mask=start"),),
    "chunks begin at one place": (("place += tl.sum(mine)", "place += 0"),),
    "another token's row": (("(assignments // K)", "(assignments % K)"),),
    "the depth has no end": (
        ("mask=step[None, :] < DEPTH - start", "mask=step[None, :] < DEPTH"),
        ("mask=step[:, None] < DEPTH - start", "mask=step[:, None] < DEPTH"),
    ),
    "up has gate's bias": (("tl.load(bias_ptrs + I)", "tl.load(bias_ptrs)"),),
    "no bias of the second product": (("out += tl.load(bias_ptr", "out += 0 * tl.load(bias_ptr"),),
    "up is clamped from above alone": (("tl.where(up < -limit, -limit, up)", "up"),),
    "no alpha": (("_rounded(gate * alpha, dtype)", "_rounded(gate, dtype)"),),
    "up without its one": (("_rounded(up + 1.0, dtype)", "_rounded(up, dtype)"),),
    "a weight of an empty slot counts": (
        ("tl.where((expert >= 0) & (expert < P), _rounded", "tl.where(True, _rounded"),
    ),
    "an id beyond the last expert is one": (
        ("(ids >= 0) & (ids < P), ids, P)", "ids >= 0, tl.minimum(ids, P - 1), P)"),
    ),
}


WRONG_OF_FEW: dict[str, tuple[tuple[str, str], ...]] = {
    "a block takes all of its expert": (("tl.sum(mine.to(tl.int32), 0) - first, BLOCK_M)", "BLOCK_M, BLOCK_M)"),),
    "blocks begin with the first of the expert": (("wanted = first + tl.minimum(", "wanted = tl.minimum("),),
    "numbers begin at one": (("tl.cumsum(mine.to(tl.int32), 0) - 1", "tl.cumsum(mine.to(tl.int32), 0)"),),
    "only the first block of an expert": (("(first % BLOCK_M == 0)", "(first == 0)"),),
}


def _verdict(monkeypatch: pytest.MonkeyPatch, *, planned: bool = True) -> bool:
    """Return whether the kernel is right.  Memory that is not written holds ones: values read there are wrong, and an
    index read there points to memory of the test."""
    monkeypatch.setattr(experts, "plan_chunk", lambda _: 16)
    if planned:
        plan_all(monkeypatch)
    monkeypatch.setattr(torch, "empty", torch.ones)
    names = ("biases and clamps", "empty slots", "all to one expert", "odd sizes", "unweighted, empty slots")
    cases = [CASES[name](FLOAT) for name in names]
    return all(case.is_right(run(case)) for case in cases) and _adds_up(HALF) and _adds_up(FLOAT)


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "kernels", interpreted.mutated(experts_kernels, tmp_path, *WRONG[name]))
    assert not _verdict(monkeypatch)


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG_OF_FEW)
def test_wrong_kernels_without_a_plan_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "kernels", interpreted.mutated(experts_kernels, tmp_path, *WRONG_OF_FEW[name]))
    assert not _verdict(monkeypatch, planned=False)


@pytest.mark.mutant
@pytest.mark.parametrize("planned", [True, False])
def test_right_kernels_pass_what_notices_wrong_ones(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _verdict(monkeypatch, planned=planned)


# FP8 and integers of 4 bits.


def _in_form(case: Case, form: str) -> tuple[Case, Case]:
    """Return the case with the values that a form holds, and the case with the weights in that form."""
    dtype, (experts, hidden, inner) = case.hidden.dtype, case.w2.shape
    storage = RowMajorHeld(form, dtype, "cpu")
    w13, w2 = storage.empty_experts(experts, inner, hidden, dtype, "cpu")
    whole = {"gate_proj": case.w13[:, :inner], "up_proj": case.w13[:, inner:], "down_proj": case.w2}
    for part, matrices in whole.items():
        for expert, matrix in enumerate(matrices):
            storage.expert_place(w13, w2, part, expert, inner, hidden).write(matrix)  # type: ignore[arg-type]
    held = {part: held_of(form, matrices) for part, matrices in whole.items()}
    values = replace(case, w13=torch.cat([held["gate_proj"], held["up_proj"]], 1), w2=held["down_proj"])
    return values, replace(case, w13=w13, w2=w2)


def _held_case(form: str, tokens: int = 3) -> Case:
    """Draw a case with blocks of very different scales, which are cut at both edges."""
    case = draw(tokens, dtype=HALF, experts=2, hidden=200, inner=136, clamped=True)
    case.w13[:, :128] *= 3
    case.w13[:, 136:] *= 0.5
    case.w13[:, :, 128:] *= 4
    case.w13[:, :, 32:64] *= 3
    case.w13[0] *= 2
    case.w2[:, 128:] *= 3
    case.w2[:, :, 128:] *= 8
    return case


def _held_error(form: str) -> float:
    """Return the error of the products of weights in a form, against float64 products of their values."""
    values, held = _in_form(_held_case(form), form)
    return values.error(run(held))


@pytest.mark.parametrize("form", ROW_FORMS)
def test_weights_in_fewer_bits_are_multiplied_as_their_values(form: str) -> None:
    assert _held_error(form) < TOLERANCE[HALF]


@pytest.mark.parametrize("form", ROW_FORMS)
def test_rows_of_weights_in_fewer_bits_are_the_same_in_every_batch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are fixed: numpy's sums depend on them."""
    monkeypatch.setitem(EXPERT_TILES, 1, ((float("inf"), EXPERT_TILES[1][0][1]),))
    case = _in_form(_held_case(form, tokens=24), form)[1]
    whole = run(case)
    for index in (torch.tensor([5]), torch.tensor([23, 0, 7]), torch.arange(17)):
        assert torch.equal(run(case.rows(index)), whole[index])


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        ("fp8", "+ start // SCALE_BLOCK)", ")"),
        ("fp8", "+ w_rows * (STRIDE // 4)", "+ w_rows * 0"),
        ("fp8", "(first_row * STRIDE + SCALES_AT) // 4", "SCALES_AT // 4"),
        ("int4", "_int4_values(both & 15,", "_int4_values(both >> 4,"),
        ("int4", "scales + start // HALF + 1", "scales + start // HALF"),
        ("int4", "+ w_rows * (STRIDE // 2)", "+ w_rows * 0"),
        ("int4", "(first_row * STRIDE + SCALES_AT) // 2", "SCALES_AT // 2"),
        ("int4", "both >> 4", "both & 15"),
        ("int4", "- 8.0", "- 7.0"),
    ],
)
def test_other_scales_and_integers_are_noticed(
    form: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "kernels", interpreted.mutated(experts_kernels, tmp_path, (old, new)))
    assert not _held_error(form) < TOLERANCE[HALF]


# Nothing is read by the host.


class _NotRun:
    """A stand-in for a kernel that notes its launches."""

    def __init__(self, launches: list[str], name: str) -> None:
        self._launches, self._name = launches, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(size, int) and size > 0 for size in grid)
        return lambda *_, **__: self._launches.append(self._name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    noted: list[str] = []
    for name in ("plan_kernel", "gate_up_kernel", "down_kernel", "weighted_sum_kernel"):
        monkeypatch.setattr(experts_kernels, name, _NotRun(noted, name))
    yield noted


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("compute", [experts.fused_experts, grouped_experts])
def test_no_value_is_read_by_the_host(
    compute: Callable[..., torch.Tensor], weighted: bool, launches: list[str]
) -> None:
    """The tensors have no values: reading a value, or a count that depends on values, is an error."""
    case = with_empty_slots(draw(40, dtype=torch.bfloat16, clamped=True, weighted=weighted)).on("meta")
    out = compute(*case.arguments())
    assert out.shape == ((40, 72) if weighted else (40, 2, 72))
    of_sum = ["weighted_sum_kernel"] * weighted
    assert launches in ([], ["plan_kernel", "gate_up_kernel", "down_kernel", *of_sum])
    assert bool(launches) == (compute is experts.fused_experts)


def test_few_assignments_take_no_plan(launches: list[str]) -> None:
    for tokens, planned in ((1, []), (32, []), (33, ["plan_kernel"])):
        launches.clear()
        experts.fused_experts(*draw(tokens, dtype=torch.bfloat16).on("meta").arguments())
        assert launches == [*planned, "gate_up_kernel", "down_kernel", "weighted_sum_kernel"]


@pytest.mark.mutant
def test_a_look_at_a_value_is_noticed() -> None:
    case = draw(40, dtype=torch.bfloat16).on("meta")
    for look in (lambda: plain_ops().fused_experts(*case.arguments()), lambda: case.ids.nonzero(), case.ids.tolist):
        with pytest.raises(RuntimeError):
            look()


# What stands around the kernels.


def _layer(ops: Any) -> Experts:
    spec = MoESpec(router=RouterSpec(num_experts=4, top_k=3), inner=24)
    placement = ExpertPlacement(ExpertLocationMetadata(torch.arange(4).unsqueeze(0), 4))
    layer = Experts(spec, 40, 0, placement, Build(ops, FLOAT, "cpu", Parallel()))
    generator = torch.Generator().manual_seed(0)
    for held in layer.slot_tensors():
        held.copy_(torch.randn(held.shape, generator=generator) * held.shape[-1] ** -0.5)
    return layer


@pytest.mark.parametrize("weighted", [True, False])
def test_a_layer_hands_empty_slots_to_operators_that_take_them(weighted: bool) -> None:
    ops = plain_ops()
    case = with_empty_slots(draw(6, top_k=3, hidden=40, weighted=weighted))
    work = DispatchOutput(case.hidden, case.ids, case.weights, None, has_holes=True)
    expected = _layer(ops)(work)
    taking = _layer(ops.replace(fused_experts=experts.fused_experts, takes_empty_slots=True))
    taking._of_filled_slots = None  # type: ignore[assignment, method-assign]
    torch.testing.assert_close(taking(work), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("compute", [experts.fused_experts, grouped_experts])
def test_arguments_are_those_of_the_operator(compute: Callable[..., torch.Tensor]) -> None:
    schema = torch.ops.lockstep.fused_experts.default._schema
    given = [name for name, one in inspect.signature(compute).parameters.items() if one.kind != one.KEYWORD_ONLY]
    assert given == [argument.name for argument in schema.arguments]


def test_the_operators_of_a_gpu_take_empty_slots() -> None:
    assert gpu_ops().takes_empty_slots and not plain_ops().takes_empty_slots


@pytest.mark.parametrize("name", CASES)
def test_experts_by_grouped_products_agree_with_float64(name: str) -> None:
    case = CASES[name](FLOAT)
    if name == "odd sizes":  # which grouped_mm does not take
        case = draw(3, top_k=3, hidden=36, inner=20, clamped=True)
    assert case.error(grouped_experts(*case.arguments())) < TOLERANCE[FLOAT]  # type: ignore[arg-type]


def test_the_choice_is_by_load_and_by_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_plan, "EXPERT_CHOICE", ((4, "triton"), (float("inf"), "grouped_mm")))
    assert choose_implementation(16, 4) == "triton" and choose_implementation(17, 4) == "grouped_mm"
    monkeypatch.setattr(experts, "grouped_experts", lambda *_: "grouped_mm")
    monkeypatch.setattr(experts, "of_matrices", lambda *_, **__: "triton")
    cases = (draw(8), draw(9), draw(9, hidden=37))  # rows of 148 bytes are not aligned
    assert [run(case) for case in cases] == ["triton", "grouped_mm", "triton"]


def test_tiles_grow_with_the_load_and_keep_the_depth() -> None:
    """At least 64 rows for four warps each: that many a matrix instruction of Hopper takes, one for all loads."""
    for itemsize, table in EXPERT_TILES.items():
        limits = [limit for limit, _ in table]
        assert limits == sorted(limits) and limits[-1] == float("inf")
        assert all(tiles.rows >= 16 * tiles.num_warps for _, tiles in table), itemsize
    assert choose_tiles(8, 128, torch.bfloat16).tokens == 16
    assert choose_tiles(16384 * 8, 128, torch.bfloat16).tokens == 128


def test_tiles_of_bfloat16_are_those_that_were_faster_on_a_device() -> None:
    """On an H100, of 128 experts and top-8: 128 x 256 took 499.7 us at 1,024 tokens, and 64 x 128 508.7.

    At 512 tokens 64 x 128 was within 1 % of the best.
    """
    assert choose_tiles(512 * 8, 128, torch.bfloat16) == Tiles(tokens=64, rows=128, num_warps=4, num_stages=4)
    assert choose_tiles(1024 * 8, 128, torch.bfloat16) == Tiles(tokens=128, rows=256, num_warps=8, num_stages=4)


@pytest.mark.full
def test_one_matrix_instruction_serves_all_loads_in_the_memory_of_a_multiprocessor(tmp_path: Path) -> None:
    """Compiled for Hopper, whose wgmma takes 64 rows; a smaller tile would take another instruction."""
    table = tmp_path / "table.json"
    words = [sys.executable, "-m", "benchmarks.gpu_kernels_table", "--only", "experts", "--json", str(table)]
    subprocess.run(words, cwd=ROOT, env=interpreted.compiling_environment(), check=True, timeout=COMPILE_TIMEOUT_S)
    rows = json.loads(table.read_text())
    products = [row for row in rows if row["name"].startswith(("experts gate and up,", "experts down,"))]
    # Kernels, clamped or not: 16-bit weights by tiles, FP8 and INT4 likewise, float32, and few assignments of each of
    # the five.  The first kernel also adds adapters, in four cases.
    assert len(products) == 2 * 2 * (4 * 4 + 1 + 5) + 4
    for row in products:
        assert (row["matrix_instruction"] == "wgmma") == ("fp32" not in row["name"]), row
    assert max(row["shared_bytes"] for row in rows) <= SHARED_BYTES

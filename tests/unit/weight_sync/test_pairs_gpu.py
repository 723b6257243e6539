"""Quantised weights by the tables of a device, interpreted: bits and fingerprints of single tensors, and refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from tests import interpreted  # before any kernel

# isort: split
from rollout.kernels.places import ShardPlace, ViewPlace
from rollout.kernels.row_places import ROW_FORMS, RowsPlace
from tests.interpreted import compiling_environment, mutated
from tests.unit.weight_sync.test_take_pairs import NAME, OneMatrix, expected, in_a_bucket, matrix, planned, sent_as
from weight_sync import pair_kernels, pairs_gpu, take_pairs
from weight_sync.fingerprint import fingerprint
from weight_sync.held_format import FP8_BLOCKS, HeldFormat
from weight_sync.moves import MoveKind
from weight_sync.pair_tables import PairForm, PairRow
from weight_sync.plan import BucketPlan
from weight_sync.spans import DTYPE_CODES
from weight_sync.tensor_meta import Place, TensorMeta

assert interpreted
GUARD = 1 << 16
BEFORE, BEHIND = 3, 2
"""Rows of other weights in the same storage."""


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take tables by the kernel of a device, in tiles of the rows of a block: fewer steps for the interpreter."""
    monkeypatch.setattr(take_pairs, "kernels_of", lambda device: pairs_gpu)
    monkeypatch.setattr(pairs_gpu, "_ROWS", pairs_gpu.TILE)


def place_of(held: str, rows: int, columns: int) -> Place:
    """Return the place of a matrix among other rows, in memory with any content."""
    if held in ROW_FORMS:
        form = ROW_FORMS[held]
        storage = form.empty([BEFORE + rows + BEHIND], columns, "cpu")
        others = storage.view(torch.uint8)
        others.copy_(torch.randint(0, 256, others.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5)))
        return RowsPlace(form, storage[BEFORE : BEFORE + rows], columns, torch.bfloat16)
    return ViewPlace(torch.zeros(rows, columns + 3, dtype=getattr(torch, held))[:, 1 : columns + 1])


def format_of(held: str) -> HeldFormat | None:
    return ROW_FORMS[held].held if held in ROW_FORMS else None


class Case:
    """One weight as it came, in a bucket, and a model that holds it in some form; `live`: all bytes of its storage.

    `format`: how it is held, by default in the form `held`.
    """

    def __init__(self, form: str, held: str, shape: tuple[int, int], format: HeldFormat | None = None) -> None:
        dtype = torch.bfloat16 if held in ROW_FORMS else getattr(torch, held)
        self.sent = sent_as(form, matrix(*shape, 0), dtype)
        self.format, self.place = format or format_of(held), place_of(held, *shape)
        self.weights = OneMatrix(TensorMeta(NAME, dtype, shape), self.place)
        self.layout, self.content = in_a_bucket(self.sent.tensors, gap=4 if self.sent.pair is None else shape[0] % 5)
        self.live = torch.empty(0, dtype=torch.uint8).set_(self.place.storage.untyped_storage())

    def plan(self) -> BucketPlan:
        return planned(self.weights, self.layout, {} if self.format is None else {NAME: self.format})

    def wanted(self) -> tuple[torch.Tensor, list[int]]:
        """Return what the storage is to hold, and the fingerprints; the storage stays."""
        values, stored = expected(self.sent, self.format)
        before = self.live.clone()
        self.place.write(stored)
        wanted = self.live.clone()
        self.live.copy_(before)
        sums = [fingerprint(part) for part in self.sent.tensors.values()]
        return wanted, [*sums, *[0] * (3 - len(sums)), fingerprint(values)]


def guarded(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy in the middle of a large area, and the area: a wrong kernel reaches beyond its bytes."""
    area = torch.full((2 * GUARD + content.numel(),), 0x3C, dtype=torch.uint8)
    area[GUARD : GUARD + content.numel()] = content
    return area[GUARD : GUARD + content.numel()], area


def is_guarded(area: torch.Tensor) -> bool:
    return bool((area[:GUARD] == 0x3C).all() and (area[-GUARD:] == 0x3C).all())


def check(case: Case, module: ModuleType = pairs_gpu) -> None:
    """Take a bucket by the kernel of `module`: checked alone, written, and folded; compare all that comes of it."""
    plan, (wanted, sums) = case.plan(), case.wanted()
    assert plan.pairs is not None and not plan.rest
    tables = plan.pairs.tables
    kernels = module.GpuPairs(case.content, tables._pairs, tables._moves, [case.live])
    (storage, area), before = guarded(case.live), case.live.clone()
    found = kernels.take(case.content, [storage], writes=False)
    assert torch.equal(storage, before)
    assert [word & (1 << 64) - 1 for word in found[0][0].tolist()] == sums and found[1].tolist() == [0]
    assert not kernels.take(case.content, [storage], checks=False)[0].any()
    assert torch.equal(storage, wanted) and is_guarded(area)
    shadow, area = guarded(torch.zeros_like(before))
    again = kernels.take(case.content, [shadow], live=[case.live])
    assert torch.equal(again[0], found[0]) and torch.equal(case.live, before)
    written = shadow != 0
    assert torch.equal((shadow ^ before)[written], wanted[written]) and is_guarded(area)
    assert torch.equal(torch.where(written, wanted, before), wanted), "what is not written stays"


CASES = [
    ("fp8 float32", "fp8"),
    ("int4 32", "int4"),
    ("values float32", "int4-128"),
    ("values bfloat16", "fp8"),
    ("fp8 float16", "float16"),
]
MORE_CASES = [
    ("fp8 bfloat16", "int4-128"),
    ("int4 128", "fp8"),
    ("int4 32", "float32"),
    *((sent, "int4") for sent in ("fp8 float32", "int4 128", "values bfloat16")),
    ("int4 128", "int4-128"),
    ("int4 32", "fp8"),
    ("values float16", "fp8"),
    *(("fp8 float16", held) for held in ("bfloat16", "float32")),
    *(("int4 32", held) for held in ("bfloat16", "float16")),
]
SMALL, CUT = (33, 128), (140, 224)  # one block, whose parts lie at odd addresses, and some that are cut
FITTING = [
    *((*case, CUT) for case in CASES),
    *((*case, SMALL) for case in CASES[:2]),
    ("int4 32", "int4", (33, 160)),  # whose last 64 columns are the first of a block
    *(pytest.param(*case, SMALL, marks=pytest.mark.full) for case in (*CASES[2:], *MORE_CASES)),
    *(pytest.param(*case, CUT, marks=pytest.mark.full) for case in MORE_CASES if case[0] != "int4 128"),
]


@pytest.mark.parametrize(("form", "held", "shape"), FITTING)
def test_a_table_leaves_what_a_single_tensor_leaves(form: str, held: str, shape: tuple[int, int]) -> None:
    check(Case(form, held, shape))


@pytest.mark.parametrize("form", ["fp8", pytest.param("int4", marks=pytest.mark.full)])
def test_a_block_is_taken_some_rows_at_a_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_gpu, "_ROWS", 32)
    check(Case("values bfloat16", form, (140, 128)))


@pytest.mark.parametrize("held", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_values_that_are_quantised_and_not_held_so(held: str) -> None:
    check(Case(f"values {held}", held, (140, 224), FP8_BLOCKS))


def odd_values(form: str) -> Case:
    """Return ties, the smallest numbers, a block of zeros, and one whose scale is below the normal numbers."""
    case = Case("values bfloat16", form, (256, 256))
    x = case.sent.values
    x[:128, :128] = 0
    x[:128, 128:] = torch.tensor([1e-40, -1e-40, 3e-39, 0.0]).repeat(32)
    x[128:, :128] = torch.arange(-64, 64).float() * 3.5
    x[128:, 128:] = torch.tensor([448.0, -447.0, 0.001953125, 0.0029296875, 20.0, 21.0, -0.0, 0.5]).repeat(16)
    case.content[4:].copy_(x.contiguous().view(-1).view(torch.uint8))
    return case


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_odd_values_are_rounded_as_torch_rounds(form: str) -> None:
    check(odd_values(form))


def found_in(case: Case) -> int:
    """Take a bucket by its plan; return what is found wrong."""
    plan = case.plan()
    assert plan.pairs is not None
    _, found = plan.take(case.content, [case.live])
    assert found is not None
    return int(found.wrong[0])


def changed(case: Case, name: str, where: tuple[int, int], value: float) -> int:
    """Change a number of a part in the bucket; return what is found wrong."""
    (at,) = (at for at, meta in enumerate(case.layout.metas) if meta.name == NAME + name)
    part, start = case.sent.tensors[NAME + name].clone(), case.layout.offsets[at]
    if part.dtype == torch.float8_e4m3fn:
        part.view(torch.uint8)[where] = int(value)
    else:
        part.view(-1, part.shape[-1])[where] = value
    case.content[start : start + part.nbytes] = part.view(-1).view(torch.uint8)
    return found_in(case)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("form", "held", "name", "value", "wrong"),
    [
        ("values bfloat16", "fp8", "", float("nan"), 1),
        ("values bfloat16", "int4", "", float("inf"), 1),
        ("values float32", "int4", "", 3.4e38, 1),
        ("fp8 float32", "fp8", "", 0x7F, 1),
        ("fp8 float32", "int4", "", 0xFF, 1),
        ("fp8 float32", "fp8", "_scale_inv", -1.0, 2),
        ("fp8 float32", "bfloat16", "_scale_inv", float("inf"), 3),
        ("fp8 float32", "fp8", "_scale_inv", 2.0**120, 9),
        ("int4 32", "int4", "_scale", 0.0, 2),
        ("int4 32", "fp8", "_scale", float("nan"), 3),
        ("int4 32", "int4", "_scale", 2.0**120, 8),
        ("int4 32", "fp8", "_shape", 7, 4),
        ("int4 128", "int4", "_shape", 7, 4),
    ],
)
def test_what_is_wrong_is_found(form: str, held: str, name: str, value: float, wrong: int) -> None:
    assert changed(Case(form, held, (140, 256)), name, (-1, -1), value) == wrong


def test_zero_is_a_scale_of_fp8() -> None:
    assert changed(Case("fp8 float32", "fp8", (140, 256)), "_scale_inv", (0, 1), 0.0) == 0


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fp8", pytest.param("int4", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("dim", "start", "length"), [(0, 128, 44), pytest.param(1, 128, 128, marks=pytest.mark.full), (1, 256, 96)]
)
def test_a_shard_gets_its_part(form: str, dim: int, start: int, length: int) -> None:
    check(sharded(form, dim, start, length))


def sharded(form: str, dim: int, start: int, length: int) -> Case:
    case = Case("fp8 float32", form, (172, 352))
    sizes = [172, 352]
    sizes[dim] = length
    place = ShardPlace(place_of(form, *sizes), dim, start, length)
    case.place, case.weights._place = place, place
    case.live = torch.empty(0, dtype=torch.uint8).set_(place.storage.untyped_storage())
    return case


@pytest.mark.parametrize(("form", "dim", "start"), [("fp8", 0, 64), ("fp8", 1, 64), ("int4", 1, 64)])
def test_a_shard_that_begins_inside_a_block_goes_by_itself(form: str, dim: int, start: int) -> None:
    case = Case("fp8 float32", form, (172, 352))
    sizes = [172, 352]
    sizes[dim] = 64
    case.weights._place = ShardPlace(place_of(form, *sizes), dim, start, 64)
    assert list(case.plan().rest) == [0, 1]


def test_two_places_of_a_weight() -> None:
    case = Case("values bfloat16", "fp8", (140, 224))
    other = place_of("fp8", 140, 224)
    with mock.patch.object(OneMatrix, "places", lambda self, name: [case.place, other]):
        plan, live = case.plan(), torch.empty(0, dtype=torch.uint8).set_(other.storage.untyped_storage())
        plan.take(case.content, [case.live, live])
    assert torch.equal(case.live, live) and torch.equal(case.live, case.wanted()[0])


def test_a_cpu_does_not_take_rows_by_its_kernel() -> None:
    """Its operator knows packed matrices alone."""
    with mock.patch.object(take_pairs, "kernels_of", lambda device: None):
        assert list(Case("fp8 float32", "fp8", (140, 224)).plan().rest) == [0, 1]
        assert list(Case("values bfloat16", "int4", (140, 224)).plan().rest) == [0]


# --- tables -----------------------------------------------------------------------------------------------------------

WRONG_ROWS = {
    "begins too late": {0: 1 << 20},
    "an unknown form as sent": {1: 3},
    "no dtype": {2: 99},
    "a shape of another dtype": {2: 2},
    "scales outside": {3: 1 << 20},
    "a shape outside": {4: 1 << 20},
    "no group": {5: 0},
    "groups of 64": {5: 64},
    "too many rows": {6: 44},
    "too many columns": {7: 288},
    "sizes whose product overflows": {6: 1 << 40, 7: 1 << 40},
    "values of an integer": {8: 7},
    "8 bits as held": {9: 3},
    "groups that are not held": {10: 64},
    "a number below zero": {0: -1},
}
WRONG_MOVES = {
    "no such pair": {0: 1},
    "rows of another form": {1: int(MoveKind.ROWS_FP8)},
    "a packed matrix": {1: int(MoveKind.PACKED_INT4)},
    "no such storage": {2: 1},
    "behind the end": {3: 1 << 20},
    "between two numbers": {3: 1},
    "rows behind the last": {4: 1},
    "columns behind the last": {6: 128},
    "a block that is cut": {6: 32, 7: 224},
    "rows that overlap": {8: 64},
    "rows that are not aligned": {8: 161},
    "scales among the elements": {9: 64},
}


@pytest.mark.parametrize(
    ("table", "change"),
    [*(("_pairs", change) for change in WRONG_ROWS.values()), *(("_moves", change) for change in WRONG_MOVES.values())],
    ids=[*WRONG_ROWS, *WRONG_MOVES],
)
def test_a_table_that_points_outside_is_refused(table: str, change: dict[int, int]) -> None:
    case = Case("int4 32", "int4", (40, 256))
    plan = case.plan()
    assert plan.pairs is not None
    for column, number in change.items():
        getattr(plan.pairs.tables, table)[0, column] = number
    before = case.live.clone()
    with pytest.raises(RuntimeError, match=r"^(pair|move) 0 (has|is|lies|begins)"):
        plan.take(case.content, [case.live])
    assert torch.equal(case.live, before)


def test_tables_are_checked_once_for_buckets_of_one_layout() -> None:
    case, kind, made = Case("fp8 float32", "fp8", (140, 224)), pairs_gpu.GpuPairs, []
    plan, wanted = case.plan(), case.wanted()[0]
    with mock.patch.object(pairs_gpu, "GpuPairs", lambda *given: made.append(given) or kind(*given)):
        for _ in range(2):
            storage = case.live.clone()
            plan.take(case.content, [storage])
            assert torch.equal(storage, wanted) and len(made) == 1
        plan.take(torch.cat([case.content, case.content]), [storage])
        assert len(made) == 2
        with pytest.raises(RuntimeError, match=r"move 0 lies outside of its storage"):
            plan.take(case.content, [storage[: storage.numel() // 2]])
        with pytest.raises(RuntimeError, match="lies outside of the source"):
            plan.take(case.content[:-1], [storage])


def test_weights_of_one_form_are_one_launch() -> None:
    """Sizes and places make no difference."""
    forms = ("fp8 float32", "fp8 float32", "int4 32")
    rows, steps, source = [], [], 0
    for number, (form, shape) in enumerate(zip(forms, ((33, 128), (140, 224), (140, 224)))):
        case = Case(form, "fp8", shape)
        plan = case.plan()
        assert plan.pairs is not None
        rows += [PairRow(*row) for row in plan.pairs.tables._pairs.tolist()]
        steps += [pairs_gpu.SpanMove(*row)._replace(tensor=number) for row in plan.pairs.tables._moves.tolist()]
        source += case.content.numel()
    work = pairs_gpu.work_of([row._replace(offset=0, scales=0, shape=0) for row in rows], steps, 0)
    assert sorted(map(len, work.values())) == [4, 5]


@pytest.mark.parametrize(
    ("form", "offsets", "phase", "is_aligned"),
    [
        ("int4", (4, 2, 8), 0, True),
        ("int4", (2, 2, 8), 0, False),
        ("int4", (4, 1, 8), 0, False),
        ("int4", (4, 2, 4), 0, False),
        ("int4", (4, 2, 8), 1, False),
        ("int4", (0, 6, 4), 4, True),
        ("fp8", (3, 4, 0), 0, True),
        ("fp8", (4, 3, 0), 0, False),
        ("values", (2, 1, 1), 0, True),
        ("values", (1, 0, 0), 0, False),
    ],
)
def test_parts_at_odd_addresses_have_a_kernel_of_their_own(
    form: str, offsets: tuple[int, int, int], phase: int, is_aligned: bool
) -> None:
    """The interpreter reads at any address, where a device does not."""
    kind = {"values": PairForm.VALUES, "fp8": PairForm.FP8, "int4": PairForm.INT4}[form]
    sent = DTYPE_CODES[{"values": torch.bfloat16, "fp8": torch.float32, "int4": torch.int64}[form]]
    (offset, scales, shape), values = offsets, DTYPE_CODES[torch.bfloat16]
    row = PairRow(offset, kind, sent, scales, shape, 32, 128, 128, values, PairForm.INT4, 32)
    assert pairs_gpu.PairKernel.of(row, True, phase).is_aligned == is_aligned


# --- wrong kernels ----------------------------------------------------------------------------------------------------


def some_cases() -> Iterator[Case]:
    yield from map(odd_values, ("fp8", "int4"))
    yield Case("values float32", "int4-128", (140, 352))
    yield Case("fp8 float32", "fp8", (140, 224))
    yield Case("fp8 bfloat16", "int4", (140, 160))
    yield sharded("fp8", 0, 128, 44)
    yield Case("int4 32", "int4", (140, 224))
    yield Case("int4 32", "float16", (140, 224))
    yield Case("values bfloat16", "fp8", (140, 224))


WRONG_KERNELS = [
    ("tl.where(magnitude < 8, small,", "tl.where(magnitude < 0, small,"),
    ("0.001953125", "0.0009765625"),
    ("(bits + 0x7FFFF + ((bits >> 20) & 1))", "(bits + 0x80000)"),
    ("bits < 0x3C800000", "bits < 0x3C000000"),
    ("| ((given >> 24) & 0x80)", ""),
    ("| ((bits & 0x80) << 24)", ""),
    ("tl.where((at >> 12) == block, here, behind)", "here"),
    ("table + (at & 4095)", "table + (along & 4095)"),
    ("word.to(tl.uint64) + 1", "word.to(tl.uint64)"),
    ("((row >> 7) * ((columns + 127) >> 7)", "((row >> 7) * (columns >> 7)"),
    ("(columns // GROUP) + column // GROUP) * 2", "(columns // GROUP) + (column + 1) // GROUP) * 2"),
    ("((at & 1) * 4)", "((at & 1) * 0)"),
    ("* values_of(word, 2), 2)", "* values_of(word, 2), 1)"),
    ("first, along = row * of_row + first_column // GROUP,", "first, along = row * of_row,"),
    ("add(sums + 2, size", "add(sums + 3, size"),
    ("first = row * of_row + first_column // 8", "first = row * of_row"),
    ("7.5), 2)", "7.0), 2)"),
    ("> 0.0, word_RG, 0x3F80)", "> 0.0, word_RG, 0)"),
    ("(near_RGg + 12582912.0) - 12582912.0", "near_RGg"),
    ("-8.0), 7.0)", "-7.0), 7.0)"),
    ("whole_RGg + 8", "whole_RGg + 7"),
    ("tl.where(x < width, code, 0)", "tl.where(x < width - 1, code, 0)"),
    ("(x >= 0) & (x < up_to_scales)", "(x >= 0)"),
    ("up_to_scales) // 4 + (left >> 7)", "up_to_scales) // 4"),
    ("< width, integer, 8)", "< width, integer, 0)"),
    ("1 + 15 * tl.arange(0, 2)", "16 - 15 * tl.arange(0, 2)"),
    ("(width + HELD_GROUP - 1) // HELD_GROUP", "width // HELD_GROUP"),
    ("(group < up_to_scales // 16)", "(group < up_to_scales)"),
    ("scale = tl.div_rn(largest, 448.0)", "scale = largest * (1.0 / 448.0)"),
    ("tl.where(scale > 0.0, scale, 1.0)", "scale"),
    (
        "range(0, TILE, ROWS):\n            row = (first_row + down",
        "range(0, TILE, ROWS):\n            row = (first_row",
    ),
    ("word = word.to(WORD) ^ tl.load(live", "word = word.to(WORD) | tl.load(live"),
    ("(y >= 0) & (y < tl.load(move + 5))", "(y < tl.load(move + 5))"),
    ("add(sums + 3, word, is_there", "add(sums + 3, bits_of(value, VALUES), is_there"),
]


@pytest.mark.mutant
@pytest.mark.parametrize(("old", "new"), WRONG_KERNELS)
def test_a_wrong_kernel_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    is_step = old in Path(pair_kernels.__file__).read_text()
    steps = mutated(pair_kernels, tmp_path, (old, new)) if is_step else pair_kernels
    with mock.patch.dict(sys.modules, {pair_kernels.__name__: steps}):
        wrong: Any = mutated(pairs_gpu, tmp_path, *([] if is_step else [(old, new)]))
    wrong._ROWS = 32 if "down" in old else wrong.TILE
    with pytest.raises(AssertionError):
        for case in some_cases():
            check(case, wrong)


_COMPILE = """
from benchmarks.compile_cases import CompileCase
from benchmarks.gpu_kernels_table import compile_case
from weight_sync.pairs_gpu import compile_cases
for case in compile_cases():
    assert compile_case(CompileCase(*case)).spilled_bytes == 0, case[0]
    print(case[0])
"""


@pytest.mark.full
def test_every_form_of_the_kernel_compiles_for_hopper() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=compiling_environment(), capture_output=True, text=True, timeout=900
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert len(shown.stdout.split()) == len(pairs_gpu.compile_cases())

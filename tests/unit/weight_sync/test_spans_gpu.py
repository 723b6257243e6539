"""The Triton kernel of `take_spans`, in Triton's interpreter: bit for bit the plain form; and compiled for sm_90."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.interpreted import compiling_environment, mutated  # isort: skip  # before any module with kernels

from tests.tiers import examples
from tests.unit.weight_sync.test_span_tables import GOOD, MOVE, SOURCE_BYTES, STORAGE_BYTES, WRONG_MOVES, WRONG_TENSORS
from tests.unit.weight_sync.test_spans import (
    BF16,
    Bucket,
    as_bytes,
    assert_found,
    box,
    buckets,
    random_bytes,
    random_values,
    taken,
)
from weight_sync import spans_gpu, take_spans
from weight_sync.moves import MoveKind
from weight_sync.spans import CAST_DTYPES, SpanMove
from weight_sync.take_spans import Found, take_spans_plainly
from weight_sync.tensor_meta import DTYPES


def taken_by(module: ModuleType) -> Any:
    """Return the operator as the kernel of `module` computes it."""

    def take(source: Any, tensors: Any, moves: Any, storages: Any, multipliers: Any, *flags: bool) -> Found:
        found: Found = module.GpuSpans(source, tensors, moves, storages).take(source, storages, *flags)
        return found

    return take


interpreted = taken_by(spans_gpu)


def a_bucket() -> tuple[Bucket, list[SpanMove], torch.Tensor]:
    """Make tensors of every path of the kernel: casts, odd addresses, strides, more blocks than a program takes."""
    bucket, moves, end = Bucket(), [], 0
    whole = random_values((150, 160), BF16, 1)
    wire = random_values((70, 90), torch.float32, 2)
    edges = torch.tensor([[1e-40, 65520.0, 1.00390625, 1.01171875, -0.0, 3.3961776e38]])
    for tensor, view, held, gap, within in (
        (whole, whole, BF16, 0, None),
        (wire, wire[3:, 1::2].t(), BF16, 0, None),
        (edges, edges, BF16, 0, None),
        (wire / 3, wire / 3, torch.float16, 1, None),
        (whole, whole[:, 7:90], torch.float32, 3, None),
        (random_values((5000, 1), torch.int16, 3), random_values((5000, 1), torch.int16, 3), torch.int16, 0, None),
        (whole, whole, torch.float32, 0, ((400, 301), (100, 77))),
    ):
        index = bucket.add(tensor, view, held, gap, within)
        rows, columns = within[0] if within else view.shape
        moves.append(box(index, 0, end, range(rows), range(columns), columns, 1))
        end += 8 * rows * columns
        moves.append(
            box(index, 0, end, range(rows // 2, rows - rows // 5), range(columns // 3, columns // 2), 1, min(rows, 200))
        )
        end += 8 * rows * columns
    return bucket, moves, torch.zeros(end, dtype=torch.uint8)


GUARD = 4 << 20


def guarded(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy in the middle of a large area, and the area: a wrong kernel reaches beyond its bytes."""
    area = torch.full((2 * GUARD + content.numel(),), 0x3C, dtype=torch.uint8)
    area[GUARD:-GUARD] = content
    return area[GUARD:-GUARD], area


def assert_same(module: ModuleType = spans_gpu) -> None:
    """Take one bucket by the kernel of `module` and plainly, and compare all that comes of it."""
    bucket, moves, storage = a_bucket()
    (wanted, area_wanted), (storage, area), (source, _) = guarded(storage), guarded(storage), guarded(bucket.source)

    plain = taken(take_spans_plainly, source, bucket.tensors, moves, [wanted])
    found = taken(taken_by(module), source, bucket.tensors, moves, [storage])
    assert_found(plain, bucket)
    assert torch.equal(area, area_wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_the_kernel_does_what_the_plain_form_does() -> None:
    assert_same()


def test_sizes_beyond_32_bits_are_counted_in_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_gpu, "_NARROW", 0)
    assert_same()
    folded()


@settings(max_examples=examples(12), deadline=None)
@given(buckets())
def test_any_bucket_by_the_kernel(drawn: tuple[Bucket, list[SpanMove], int]) -> None:
    bucket, moves, size = drawn
    storages = [random_bytes(size, 1), random_bytes(size, 1)]
    taken(take_spans_plainly, bucket.source, bucket.tensors, moves, storages[:1])
    found = taken(interpreted, bucket.source, bucket.tensors, moves, storages[1:])
    assert torch.equal(*storages)
    assert_found(found, bucket)


@pytest.mark.parametrize("held", CAST_DTYPES)
@pytest.mark.parametrize("sent", CAST_DTYPES)
def test_casts_of_the_kernel_round_as_those_of_torch(sent: torch.dtype, held: torch.dtype) -> None:
    values = random_values((1, 4000), sent, 3)
    exponents = torch.randint(-40, 40, (1, 4000), generator=torch.Generator().manual_seed(0))
    values = torch.cat([values, (random_values((1, 4000), torch.int16, 1) * 2.0**exponents).to(sent)], 1)
    bucket, storage = Bucket(), torch.zeros(values.numel() * held.itemsize, dtype=torch.uint8)
    bucket.add(values, values, held)
    moves = [box(0, 0, 0, range(1), range(values.numel()), 0, 1)]
    found = taken(interpreted, bucket.source, bucket.tensors, moves, [storage])
    assert torch.equal(storage, as_bytes(values.to(held)))
    assert_found(found, bucket)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.is_floating_point], ids=str)
def test_a_value_that_is_not_finite_is_seen_by_the_kernel(dtype: torch.dtype) -> None:
    bucket = Bucket()
    for value in (math.nan, math.inf, -math.inf, 0.0):
        values = torch.zeros(2, 4096, dtype=dtype)
        values[1, 77] = value
        bucket.add(values, values)
    assert_found(taken(interpreted, bucket.source, bucket.tensors, [], []), bucket)


def test_tables_are_kept_for_the_next_bucket() -> None:
    bucket, moves, storage = a_bucket()
    tables = torch.tensor(bucket.tensors), torch.tensor(moves)
    kept = spans_gpu.GpuSpans(bucket.source, *tables, [storage])
    for seed in range(2):
        source = random_bytes(bucket.source.numel() + 8, seed)[: bucket.source.numel()]
        wanted = torch.zeros_like(storage)
        plain = taken(take_spans_plainly, source, bucket.tensors, moves, [wanted])
        found = kept.take(source, [torch.zeros_like(storage)])
        assert torch.equal(plain[1], found[1])
        finite = ~plain[1]
        assert torch.equal(plain[0][finite], found[0][finite])
        assert not kept.take(source, [storage], checks=False, writes=False)[0].any()
    for other in (source[1:], torch.cat([source, source]), random_bytes(2 * len(source), 0)[::2]):
        with pytest.raises(RuntimeError, match="another than its tables describe"):
            kept.take(other, [storage])


def folded(module: ModuleType = spans_gpu) -> None:
    """Take a bucket twice into shadows by tables that were used for others before, and require new ^ live in them."""
    bucket, moves, storage = a_bucket()
    live, wanted = random_bytes(storage.numel(), 3), random_bytes(storage.numel(), 3)
    kept = module.GpuSpans(bucket.source, torch.tensor(bucket.tensors), torch.tensor(moves), [live])
    others = torch.zeros_like(live), torch.zeros_like(live)  # kept, as a wrong kernel may write there once more
    kept.take(bucket.source, [others[0]], live=[others[1]])
    assert_found(taken(take_spans_plainly, bucket.source, bucket.tensors, moves, [wanted]), bucket)
    (shadow, area), before = guarded(torch.zeros_like(live)), live.clone()
    for _ in range(2):
        found = kept.take(bucket.source, [shadow], live=[live])
        assert_found(found, bucket)
        assert torch.equal(shadow ^ live, wanted)
    assert torch.equal(live, before)
    assert (area[:GUARD] == 0x3C).all() and (area[-GUARD:] == 0x3C).all()


def test_a_shadow_is_folded_with_its_live_storage() -> None:
    folded()


def test_tables_of_another_device_are_refused() -> None:
    bucket, moves, storage = a_bucket()
    tables = torch.tensor(bucket.tensors), torch.tensor(moves)
    elsewhere = storage.to("meta")
    with pytest.raises(RuntimeError, match="a storage is on meta, its source on cpu"):
        spans_gpu.GpuSpans(bucket.source, *tables, [elsewhere])
    kept = spans_gpu.GpuSpans(bucket.source, *tables, [storage])
    with pytest.raises(RuntimeError, match="another than its tables describe"):
        kept.take(bucket.source.to("meta"), [storage])
    with pytest.raises(RuntimeError, match="another than its tables describe"):
        kept.take(bucket.source, [elsewhere])
    for shadow in (elsewhere, storage[:-8], torch.cat([storage, storage])[::2]):
        with pytest.raises(RuntimeError, match=r"a shadow of .* bytes is not like its storage"):
            kept.take(bucket.source, [shadow], live=[storage])
    assert not storage.any()


def test_the_kernel_writes_only_if_asked() -> None:
    bucket, moves, storage = a_bucket()
    found = taken(interpreted, bucket.source, bucket.tensors, moves, [storage], writes=False)
    assert_found(found, bucket)
    assert not storage.any()
    zeros = taken(interpreted, bucket.source, bucket.tensors, moves, [storage], checks=False)
    assert not zeros[0].any() and not zeros[1].any()
    wanted = torch.zeros_like(storage)
    taken(take_spans_plainly, bucket.source, bucket.tensors, moves, [wanted])
    assert torch.equal(storage, wanted)


@pytest.mark.parametrize("change", [*WRONG_TENSORS.items(), *WRONG_MOVES.items()], ids=lambda change: change[0])
def test_no_wrong_table_reaches_the_kernel(change: tuple[str, dict[str, int]]) -> None:
    name, fields = change
    is_tensor = name in WRONG_TENSORS and fields is WRONG_TENSORS[name]
    tensor = GOOD._replace(**fields) if is_tensor else GOOD
    move = MOVE if is_tensor else MOVE._replace(**fields)
    storage = random_bytes(STORAGE_BYTES, 1)
    with pytest.raises(RuntimeError, match=r"^(tensor|move) 0 "):
        taken(interpreted, random_bytes(SOURCE_BYTES, 0), [tensor], [move], [storage])
    with pytest.raises(RuntimeError, match="move 0 has an unknown kind"):
        packed = MOVE._replace(kind=MoveKind.PACKED)
        taken(interpreted, random_bytes(SOURCE_BYTES, 0), [GOOD], [packed], [storage])
    assert torch.equal(storage, random_bytes(STORAGE_BYTES, 1))


def test_tables_are_checked_again_for_other_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, moves, storage = a_bucket()
    tables = take_spans.SpanTables(torch.tensor(bucket.tensors), torch.tensor(moves))
    made, kind = [], spans_gpu.GpuSpans
    monkeypatch.setattr(spans_gpu, "GpuSpans", lambda *given: made.append(given) or kind(*given))
    wanted = torch.zeros_like(storage)
    assert_found(tables.take(bucket.source, [wanted]), bucket)
    assert not made, "a CPU has no kernel"
    monkeypatch.setattr(take_spans, "kernels_of", lambda device: spans_gpu)
    source = bucket.source
    for place in (storage, storage, torch.zeros_like(storage)):
        place.zero_()
        assert_found(tables.take(source, [place]), bucket)
        assert torch.equal(place, wanted) and len(made) == 1, "addresses may change"
    tables.take(source, [torch.cat([storage, storage])])
    assert len(made) == 2
    for short in (storage[:100], storage[:-1].view(1, -1)):
        with pytest.raises(RuntimeError):
            tables.take(source, [short])
    with pytest.raises(RuntimeError, match="lies outside of the source"):
        tables.take(source[:-1], [storage])


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("start = (first_block + nth) * BLOCK", "start = first_block * BLOCK"),
        ("factor = mix_odd((first_block + nth)", "factor = mix_odd((first_block * 0 + nth)"),
        ("& (y_box < box_rows)", ""),
        ("(x_box >= 0) & (x_box < box_columns)", "(x_box < box_columns)"),
        ("top - box_row + down", "top + down"),
        ("begin = span.first_row * span.columns // BLOCK", "begin = 1 + span.first_row * span.columns // BLOCK"),
        ("along = start % columns + within", "along = within"),
        ("top, down = start // columns,", "top, down = start * 0,"),
        ("right = along - down * columns_here", "right = along"),
        ("(y_box * row_stride + x_box * column_stride)", "(y_box * columns + x_box)"),
        ("<< (8 * byte)", "<< 8"),
        ("rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "rounded = (bits + 0x8000) >> 16"),
        ("single.to(tl.float16)", "(single * 1.0001).to(tl.float16)"),
        ("y.to(tl.int64) * tl.load(move + 8)", "x.to(tl.int64) * tl.load(move + 8)"),
        ("(y >= 0) & (y < num_rows)", "(y < num_rows)"),
        ("(x >= 0) & (x < num_columns)", "(x >= 0)"),
        ("word.to(tl.uint64) + 1", "word.to(tl.uint64)"),
        ("sums + 2 * tensor + 1, flags", "sums + 2 * tensor, flags"),
        ("found_T2[:, 1] = torch.where", "torch.where"),
        ("span.sent, span.held, (phase + span.offset) % width == 0", "span.sent, span.held, True"),
        ("tl.load(first_move + tensor + 1)", "tl.load(first_move + tensor) + 1"),
    ],
)
def test_a_wrong_kernel_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    wrong = mutated(spans_gpu, tmp_path, (old, new))
    if "phase" in old:
        wrong._work_of = _counting(wrong._work_of)
        with pytest.raises(AssertionError, match="aligned"):
            assert_same(wrong)
        return
    with pytest.raises(AssertionError):
        assert_same(wrong)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("word = held ^ tl.load(", "word = held | tl.load("),
        ("tl.load(lives + number_of_storage)", "tl.load(storages + number_of_storage)"),
        ("tl.load(storages + number_of_storage)", "tl.load(lives + number_of_storage)"),
        ("if self._addresses[0] != addresses", "if not self._addresses[0]"),
        ("folds=live is not None", "folds=False"),
    ],
)
def test_a_wrong_fold_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    """Among them: folded twice, folded in the serving weights, and addresses of shadows that were left."""
    with pytest.raises(AssertionError):
        folded(mutated(spans_gpu, tmp_path, (old, new)))


def _counting(work_of: Any) -> Any:
    """Check the forms alone, as the interpreter reads at any address, where a device does not."""

    def counted(tensors: Any, phase: int) -> Any:
        found = work_of(tensors, phase)
        assert {form.is_aligned for form in found} == {True, False}, "aligned"
        return found

    return counted


_COMPILE = """
from benchmarks.compile_cases import CompileCase, compile_for
from benchmarks.gpu_kernels_table import resources
from weight_sync.spans_gpu import compile_cases
SPILLED_BYTES = {"spans_float8_e4m3fn": 32, "spans_float8_e5m2": 32, "spans_int64_folded": 16}
for case in compile_cases():
    compiled = compile_for(CompileCase(*case))
    assert "st.global" in compiled.asm["ptx"] or "only" in case[0], case[0]
    registers, spilled = resources(compiled.asm["cubin"])
    assert spilled == SPILLED_BYTES.get(case[0], 0), (case[0], registers, spilled)
    print(case[0])
"""


@pytest.mark.full
def test_every_form_of_the_kernel_compiles_for_hopper() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=compiling_environment(), capture_output=True, text=True, timeout=900
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert len(shown.stdout.split()) == len(spans_gpu.compile_cases()) == 32

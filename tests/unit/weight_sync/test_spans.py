"""`take_spans`: a bucket by two tables, against torch's own views, casts and fingerprints, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import kernels
from weight_sync.fingerprint import fingerprint, fingerprint_slice
from weight_sync.fingerprint_words import SIGNED, multipliers, signed
from weight_sync.int8_blocks import held_values
from weight_sync.moves import Move, MoveKind
from weight_sync.spans import (
    CAST_DTYPES,
    DTYPE_CODES,
    INT8_BLOCKS_CODE,
    MOVE_COLUMNS,
    TENSOR_COLUMNS,
    SpanMove,
    SpanTensor,
)
from weight_sync.take_spans import Found, take_spans_plainly
from weight_sync.tensor_meta import DTYPES

Taken = Callable[..., Found]


def compiled(*arguments: Any) -> Found:
    kernels.native_ops()
    found: Found = torch.ops.weight_sync.take_spans(*arguments)
    return found


FORMS = pytest.mark.parametrize("take", [take_spans_plainly, compiled], ids=["plain", "compiled"])


def table(rows: Sequence[Sequence[int]], columns: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, columns)


def taken(
    take: Taken,
    source: torch.Tensor,
    tensors: Sequence[SpanTensor],
    moves: Sequence[SpanMove],
    storages: Sequence[torch.Tensor],
    checks: bool = True,
    writes: bool = True,
) -> Found:
    return take(
        source,
        table(tensors, TENSOR_COLUMNS),
        table(moves, MOVE_COLUMNS),
        list(storages),
        multipliers("cpu"),
        checks,
        writes,
    )


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Make finite values of any bit pattern."""
    values = random_bytes(math.prod(shape) * dtype.itemsize, seed).view(-1)
    if dtype == torch.bool:
        return (values & 1).view(dtype).view(*shape)
    found = values.view(dtype)
    if dtype.is_floating_point:
        wide = found.double()
        found = torch.where(wide.isfinite(), wide, torch.zeros_like(wide)).to(dtype)
    return found.view(*shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


Box = tuple[tuple[int, int], tuple[int, int]]


class Bucket:
    """A source with tensors in it, their table, and the values that they must be read as."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        self.tensors: list[SpanTensor] = []
        self.values: list[torch.Tensor] = []

    @property
    def source(self) -> torch.Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.uint8), *self.parts])

    def add(
        self,
        wire: torch.Tensor,
        view: torch.Tensor,
        held: torch.dtype | None = None,
        gap: int = 0,
        box: Box | None = None,
    ) -> int:
        """Add a wire tensor, `gap` bytes after the one before, of which `view` [R, C] is the logical one.

        `box`: sizes of the tensor of which `view` is a part, and the part's first row and column.
        """
        self.parts.append(torch.zeros(gap, dtype=torch.uint8))
        offset = sum(part.numel() for part in self.parts) + view.storage_offset() * view.itemsize
        self.parts.append(as_bytes(wire))
        codes = DTYPE_CODES[view.dtype], DTYPE_CODES[held or view.dtype]
        sizes, (row, column) = box or (tuple(view.shape), (0, 0))
        within = row, view.shape[0], column, view.shape[1]
        self.tensors.append(SpanTensor(offset, *codes, *sizes, *view.stride(), *within))
        self.values.append(view.contiguous())
        return len(self.values) - 1


def assert_found(found: Found, bucket: Bucket) -> None:
    """Compare fingerprints and flags with what torch computes for each tensor."""
    dtypes = list(DTYPES.values())
    for index, (span, values) in enumerate(zip(bucket.tensors, bucket.values, strict=True)):
        for column, expected in enumerate((values, values.to(dtypes[span.held]))):
            rows = slice(span.first_row, span.first_row + span.num_rows)
            columns = slice(span.first_column, span.first_column + span.num_columns)
            share = fingerprint_slice(expected, (span.rows, span.columns), (rows, columns))
            assert int(found[0][index, column]) == signed(share), (span, column)
            is_infinite = expected.dtype.is_floating_point and not bool(expected.double().isfinite().all())
            assert bool(found[1][index, column]) == is_infinite, (span, column)


def box(tensor: int, storage: int, offset: int, rows: range, columns: range, a: int, b: int) -> SpanMove:
    return SpanMove(tensor, MoveKind.BOX, storage, offset, rows.start, len(rows), columns.start, len(columns), a, b, 0)


@st.composite
def buckets(draw: st.DrawFn) -> tuple[Bucket, list[SpanMove], int]:
    """Draw tensors of any dtype and strides, of a few elements to some hundred thousand, with boxes of each.

    And the bytes of the storage in which all boxes lie, one after the other.
    """
    bucket, moves, end = Bucket(), [], 0
    for index in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(list(DTYPES.values())))
        held = draw(st.sampled_from(CAST_DTYPES)) if dtype in CAST_DTYPES else dtype
        sizes = st.sampled_from([0, 1, 2, 3, 16, 17, 40, 64, 100, 257, 600])
        rows, columns = draw(sizes), draw(sizes)
        wire_rows, wire_columns = rows + draw(st.integers(0, 3)), columns + draw(st.integers(0, 20))
        wire = random_values((wire_rows, 2 * wire_columns), dtype, index)
        layout = draw(st.sampled_from(["whole", "rows", "transposed", "interleaved", "interleaved, transposed"]))
        if layout == "whole":
            view = wire = random_values((rows, columns), dtype, index)
        elif layout == "rows":
            view = wire[wire_rows - rows :, :columns]
        elif layout == "transposed":
            view = random_values((columns, rows), dtype, index).t()
            wire = view.t()
        elif layout == "interleaved":
            view = wire[:rows, 1::2][:, :columns]
        else:
            wire = random_values((wire_columns, 2 * wire_rows), dtype, index)
            view = wire[:columns, ::2][:, :rows].t()
        within = None
        if draw(st.booleans()):
            first = draw(st.sampled_from([0, 1, 16, 300])), draw(st.sampled_from([0, 1, 16, 300]))
            more = draw(st.integers(0, 9)), draw(st.integers(0, 70))
            rows, columns = (sum(each) for each in zip(first, more, (rows, columns), strict=True))
            within = (rows, columns), first
        bucket.add(wire, view, held, gap=draw(st.sampled_from([0, 0, 1, 2, 7])), box=within)
        for _ in range(draw(st.integers(0, 3))):
            first_row, first_column = draw(st.integers(0, rows)), draw(st.integers(0, columns))
            box_rows = range(first_row, draw(st.integers(first_row, rows)))
            box_columns = range(first_column, draw(st.integers(first_column, columns)))
            numel = len(box_rows) * len(box_columns)
            strides = [(max(1, len(box_columns)), 1), (1, max(1, len(box_rows))), (2 * len(box_columns) + 1, 2)]
            a, b = draw(st.sampled_from(strides))
            end += -end % 8
            moves.append(box(index, 0, end, box_rows, box_columns, a, b))
            end += (2 * numel + 2 * len(box_rows) + 3) * 8
    return bucket, moves, end


@settings(max_examples=150, deadline=None)
@given(buckets(), st.booleans(), st.booleans())
def test_both_forms_do_what_torch_does(drawn: tuple[Bucket, list[SpanMove], int], checks: bool, writes: bool) -> None:
    bucket, moves, size = drawn
    wanted = random_bytes(size, 1)
    dtypes = list(DTYPES.values())
    for move in moves if writes else ():
        span = bucket.tensors[move.tensor]
        values = bucket.values[move.tensor].to(dtypes[span.held])
        values = values.view(SIGNED[values.itemsize])  # as bits, of which torch changes none
        place = wanted[move.offset :][: (size - move.offset) // 8 * 8].view(values.dtype)
        place = place.as_strided((move.num_rows, move.num_columns), (move.a, move.b), place.storage_offset())
        whole, is_there = (torch.zeros(span.rows, span.columns, dtype=dtype) for dtype in (values.dtype, torch.bool))
        for content, part in ((whole, values), (is_there, torch.ones_like(values, dtype=torch.bool))):
            content[span.first_row :, span.first_column :][: span.num_rows, : span.num_columns] = part
        inside = (
            slice(move.first_row, move.first_row + move.num_rows),
            slice(move.first_column, move.first_column + move.num_columns),
        )
        place.copy_(torch.where(is_there[inside], whole[inside], place))
    for take in (take_spans_plainly, compiled):
        storage = random_bytes(size, 1)
        found = taken(take, bucket.source, bucket.tensors, moves, [storage], checks, writes)
        assert torch.equal(storage, wanted)
        if checks:
            assert_found(found, bucket)
        else:
            assert not found[0].any() and not found[1].any()


@FORMS
@pytest.mark.parametrize("shape", [(1, 300_000), (300_000, 1), (700, 4096), (37, 40_000), (4096, 130)])
@pytest.mark.parametrize("layout", ["whole", "transposed", "columns"])
@pytest.mark.parametrize("cast", [False, True])
def test_large_tensors_are_cut_into_spans(take: Taken, shape: tuple[int, int], layout: str, cast: bool) -> None:
    rows, columns = shape
    wire = random_values({"whole": shape, "transposed": shape[::-1], "columns": (rows, columns + 9)}[layout], BF16, 0)
    view = {"whole": wire, "transposed": wire.t(), "columns": wire[:, 5 : columns + 5]}[layout]
    bucket = Bucket()
    bucket.add(wire, view, torch.float32 if cast else BF16)
    held = view.float() if cast else view
    size = held.numel() * held.itemsize
    storages = [torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)]
    moves = [
        box(0, 0, 0, range(rows), range(columns), columns, 1),
        box(0, 1, 0, range(rows), range(columns), 1, rows),
    ]
    found = taken(take, bucket.source, bucket.tensors, moves, storages)
    assert_found(found, bucket)
    assert torch.equal(storages[0], as_bytes(held))
    assert torch.equal(storages[1], as_bytes(held.t()))


BF16 = torch.bfloat16


@FORMS
@pytest.mark.parametrize("sent", CAST_DTYPES)
@pytest.mark.parametrize("held", CAST_DTYPES)
def test_casts_round_as_those_of_torch(take: Taken, sent: torch.dtype, held: torch.dtype) -> None:
    """With denormals, ties and values outside of the range of `held`."""
    edges = torch.tensor([0.0, -0.0, 1e-45, 1e-40, -3e-41, 6e-8, 65504, 65519, 65520, 3.39e38, 1.00390625, 1.01171875])
    wide = torch.cat([random_values((1, 5000), sent, 3), edges.to(sent)[None], (edges / 3).to(sent)[None]], 1)
    exponents = torch.randint(-40, 40, (1, 5000), generator=torch.Generator().manual_seed(0))
    values = torch.cat([wide, (random_values((1, 5000), torch.int16, 1) * 2.0**exponents).to(sent)], 1)
    bucket, storage = Bucket(), torch.zeros(values.numel() * held.itemsize, dtype=torch.uint8)
    bucket.add(values, values, held)
    found = taken(take, bucket.source, bucket.tensors, [box(0, 0, 0, range(1), range(values.numel()), 0, 1)], [storage])
    assert torch.equal(storage, as_bytes(values.to(held)))
    assert_found(found, bucket)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("at", [0, 8, 70, 8191])
def test_one_value_that_is_not_finite_is_seen(take: Taken, dtype: torch.dtype, at: int) -> None:
    bucket = Bucket()
    for value in (math.nan, math.inf, -math.inf, 0.0):
        values = torch.zeros(2, 4096, dtype=dtype)
        if dtype.is_floating_point:
            values.view(-1)[at] = value
        bucket.add(values, values)
        bucket.add(values, values)
    found = taken(take, bucket.source, bucket.tensors, [], [])[1]
    wanted = [dtype.is_floating_point and not bool(value.double().isfinite().all()) for value in bucket.values]
    assert found.tolist() == [[one, one] for one in wanted]


@FORMS
def test_a_value_outside_of_the_held_range_is_seen_there_alone(take: Taken) -> None:
    bucket = Bucket()
    values = torch.tensor([[1.0, 7e4]])
    bucket.add(values, values, torch.float16)
    assert taken(take, bucket.source, bucket.tensors, [], [])[1].tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("gap", [0, 1, 2])
@pytest.mark.parametrize("layout", ["whole", "transposed", "columns"])
def test_rows_are_packed_as_pack_rows_does(dtype: torch.dtype, gap: int, layout: str) -> None:
    kernels.native_ops()
    for seed, (rows, depth, first, step, offset) in enumerate(
        [(32, 64, 0, 1, 0), (48, 40, 16, 2, 1), (5, 33, 3, 1, 0), (200, 2000, 7, 2, 0), (1, 1, 0, 1, 0)]
    ):
        sent = random_values((depth, rows) if layout == "transposed" else (rows, depth + 6), torch.float32, seed)
        view = sent.t() if layout == "transposed" else sent[:, :depth]
        if layout == "whole":
            sent = view = view.contiguous()
        for sent_dtype in (torch.float32, dtype):
            wire = sent.to(sent_dtype)
            logical = wire.as_strided(view.shape, view.stride())
            packed = torch.ops.lockstep.empty_packed([2], step * 16 * -(-(first + rows) // 16), depth, dtype)
            wanted = packed.clone()
            torch.ops.lockstep.pack_rows(wanted[1], logical.to(dtype), first, step, offset)
            bucket = Bucket()
            bucket.add(wire, logical, dtype, gap)
            begin = packed[1].storage_offset() * packed.itemsize
            move = Move(MoveKind.PACKED, packed, begin, 0, rows, 0, depth, first, step, offset)
            storage = packed.view(-1).view(torch.uint8)
            found = taken(compiled, bucket.source, bucket.tensors, [SpanMove.of(move, 0, 0)], [storage])
            assert torch.equal(packed, wanted)
            assert_found(found, bucket)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", [MoveKind.PACKED, MoveKind.PACKED_TRANSPOSED])
def test_boxes_are_packed_as_the_whole_is(dtype: torch.dtype, kind: MoveKind) -> None:
    """Cut a tensor at odd rows and columns, inside of groups and panels, and pack box by box."""
    kernels.native_ops()
    whole = random_values((70, 133), dtype, 5)
    turned = whole.t().contiguous() if kind == MoveKind.PACKED_TRANSPOSED else whole
    packed = torch.ops.lockstep.empty_packed([], 32 * -(-len(turned) // 16), turned.shape[1], dtype)
    packed.zero_()  # what is beyond the rows is not written
    wanted = packed.clone()
    torch.ops.lockstep.pack_rows(wanted, turned, 3, 2, 1)
    move = Move(kind, packed, 0, 0, 70, 0, 133, 3, 2, 1)
    bucket = Bucket()
    for rows in (range(17), range(17, 70)):
        for columns in (range(1), range(1, 50), range(50, 133)):
            part = whole[rows.start : rows.stop, columns.start : columns.stop].contiguous()
            bucket.add(part, part, dtype, gap=1, box=((70, 133), (rows.start, columns.start)))
    moves = [SpanMove.of(move, tensor, 0) for tensor in range(len(bucket.tensors))]
    found = taken(compiled, bucket.source, bucket.tensors, moves, [packed.view(-1).view(torch.uint8)])
    assert torch.equal(packed, wanted)
    assert_found(found, bucket)
    assert int(found[0][:, 0].sum()) == signed(fingerprint(whole))


def test_a_box_that_cuts_blocks_of_8_bits_is_refused() -> None:
    kernels.native_ops()
    span = SpanTensor(0, DTYPE_CODES[BF16], INT8_BLOCKS_CODE, 4, 64, 32, 1, 0, 4, 0, 32)
    with pytest.raises(RuntimeError, match="tensor 0 has a box that cuts blocks of 8 bits"):
        taken(compiled, random_bytes(512, 0), [span], [], [])


@pytest.mark.parametrize("sent", [torch.float32, BF16])
def test_rows_are_packed_in_8_bits_as_pack_rows_w8_does(sent: torch.dtype) -> None:
    kernels.native_ops()
    for seed, (rows, depth, first, step, offset) in enumerate(
        [(64, 64, 0, 1, 0), (40, 100, 3, 2, 1), (200, 2000, 0, 1, 0)]
    ):
        wire = (random_values((rows, depth), torch.int16, seed) * 2.0 ** (seed * 9 - 20)).to(sent)
        packed = torch.ops.lockstep.empty_packed_w8([2], step * 16 * -(-(first + rows) // 16), depth)
        wanted = packed.clone()
        torch.ops.lockstep.pack_rows_w8(wanted[1], wire.to(BF16), first, step, offset)
        move = Move(MoveKind.PACKED_W8, packed, packed[0].numel(), 0, rows, 0, depth, first, step, offset)
        bucket, storage = Bucket(), packed.view(-1).view(torch.uint8)
        bucket.add(wire, wire, BF16)
        span = bucket.tensors[0]._replace(held=INT8_BLOCKS_CODE)
        values, infinite = taken(compiled, bucket.source, [span], [SpanMove.of(move, 0, 0)], [storage])
        assert torch.equal(packed, wanted)
        assert int(values[0, 0]) == signed(fingerprint(wire))
        assert int(values[0, 1]) == signed(fingerprint(held_values(wire.to(BF16))))
        assert not infinite.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sent", [torch.float32, BF16])
def test_what_cannot_be_held_in_8_bits_is_seen(value: float, sent: torch.dtype) -> None:
    kernels.native_ops()
    wire = torch.ones(4, 64).to(sent)
    wire[2, 40] = value
    packed = torch.ops.lockstep.empty_packed_w8([], 4, 64)
    span = SpanTensor.whole(0, DTYPE_CODES[sent], INT8_BLOCKS_CODE, 4, 64, 64, 1)
    move = Move(MoveKind.PACKED_W8, packed, 0, 0, 4, 0, 64, 0, 1, 0)
    found = taken(compiled, as_bytes(wire), [span], [SpanMove.of(move, 0, 0)], [packed.view(-1).view(torch.uint8)])
    assert found[1].tolist() == [[True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rows", [range(16, 48), range(5, 38), range(1200)])
def test_columns_are_packed_as_rows(dtype: torch.dtype, rows: range) -> None:
    """A box of rows, in a tensor that is cut into several spans."""
    kernels.native_ops()
    wire = random_values((1200, 200), dtype, 1)
    packed = torch.ops.lockstep.empty_packed([], 230, len(rows), dtype)
    wanted = packed.clone()
    torch.ops.lockstep.pack_rows(wanted, wire[rows.start : rows.stop].t(), 7, 1, 0)
    move = Move(MoveKind.PACKED_TRANSPOSED, packed, 0, rows.start, len(rows), 0, 200, 7, 1, 0)
    bucket = Bucket()
    bucket.add(wire, wire)
    storage = packed.view(-1).view(torch.uint8)
    assert_found(taken(compiled, bucket.source, bucket.tensors, [SpanMove.of(move, 0, 0)], [storage]), bucket)
    assert torch.equal(packed, wanted)


@FORMS
@pytest.mark.parametrize("shift", [0, 2, 62])
def test_a_bucket_that_is_written_past_the_caches(take: Taken, shift: int) -> None:
    """Runs of many lengths to addresses of any alignment, with bytes around them that stay."""
    bucket, moves, end = Bucket(), [], shift
    for index, size in enumerate([1, 500, 513, 3000, 70_001, 1_200_000, 1_000_000]):
        values = random_values((1, size), BF16, index)
        bucket.add(values, values)
        moves.append(box(index, 0, end, range(1), range(size), 0, 1))
        end += values.nbytes + 6
    storage = random_bytes(end + 64, 0)
    wanted = storage.clone()
    for move, values in zip(moves, bucket.values, strict=True):
        wanted[move.offset :][: values.nbytes] = as_bytes(values)
    assert bucket.source.numel() > 4 << 20
    assert_found(taken(take, bucket.source, bucket.tensors, moves, [storage]), bucket)
    assert torch.equal(storage, wanted)


def test_results_do_not_depend_on_threads() -> None:
    bucket, moves, end = Bucket(), [], 0
    for index in range(400):
        values = random_values((index % 7 * 100, 128), BF16, index)
        bucket.add(values, values, torch.float32 if index % 5 == 0 else BF16)
        width = 4 if index % 5 == 0 else 2
        moves.append(box(index, 0, end, range(len(values)), range(128), 128, 1))
        end += values.numel() * width
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2, 2):
            torch.set_num_threads(count)
            storage = torch.zeros(end, dtype=torch.uint8)
            results.append((*taken(compiled, bucket.source, bucket.tensors, moves, [storage]), storage))
    finally:
        torch.set_num_threads(threads)
    assert_found(results[0][:2], bucket)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))

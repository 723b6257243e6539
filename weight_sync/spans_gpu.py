"""`take_spans` on a CUDA device: one Triton kernel with the tables on the device.

A program takes up to `_ROWS` blocks of 4096 elements of one tensor, in row-major order of its matrix, and leaves out
what is not in the tensor's box.  It reads each element once, casts it, writes it into every move that it lies in, and
adds what it found to the tensor's results:

    element i of the tensor   ->  row i // C, column i % C  ->  source + row in box * stride + column in box * stride
                                                            ->  storage + (row - first) * a + (column - first) * b

With `live` storages it writes the exclusive or of an element and what lies at its place in the live storage.  The
storage that is written to may then be pinned memory of the host, which a device reaches by the same address.

Pairs of dtypes are compiled apart, and tensors whose elements do not lie at multiples of their width, which are read
byte by byte.  Moves are boxes: other kinds are layouts of CPUs.

`GpuSpans` checks two tables and keeps them on the device, to be taken for every bucket that lies as they say, into any
storages of the sizes that were checked.  Nothing is read back: results stay on the device, in the order of the current
stream.  Sums wrap, so programs add theirs in any order.

Imported where there is Triton and something to run it (`block_sums.kernels_of` decides).  In Triton's interpreter
the results equal `take_spans.take_spans_plainly` bit for bit; it has not run on a device yet.

Shapes: T tensors, M moves, S storages, N items of work, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weight_sync.fingerprint import EXPONENTS
from weight_sync.fingerprint_gpu import mix_odd
from weight_sync.fingerprint_words import BLOCK, multipliers
from weight_sync.spans import SpanMove, SpanTensor, checked_tables
from weight_sync.tensor_meta import DTYPES

_ROWS = 4
_NUM_WARPS = 16
_NARROW = (1 << 31) - 2 * BLOCK
Found = tuple[torch.Tensor, torch.Tensor]
WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit
def read_words(place, is_there, WORD: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Read the words that begin at these bytes."""
    if ALIGNED:
        word = tl.load(place.to(tl.pointer_type(WORD), bitcast=True), mask=is_there, other=0)
    else:
        word = tl.load(place, mask=is_there, other=0).to(WORD)
        for byte in tl.static_range(1, WIDTH):
            word = word | (tl.load(place + byte, mask=is_there, other=0).to(WORD) << (8 * byte))
    return word


@triton.jit
def values_of(word, DTYPE: tl.constexpr):
    """Return floating-point numbers by their bits: float64, or the others as float32."""
    if DTYPE == 0:
        value = word.to(tl.float64, bitcast=True)
    elif DTYPE == 1:
        value = word.to(tl.float32, bitcast=True)
    elif DTYPE == 2:
        value = (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        value = word.to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def bits_of(value, DTYPE: tl.constexpr):
    """Return the bits of numbers that are rounded to a dtype, a float64 by way of float32."""
    if DTYPE == 0:
        word = value.to(tl.float64).to(tl.uint64, bitcast=True)
    else:
        single = value.to(tl.float32)
        if DTYPE == 1:
            word = single.to(tl.uint32, bitcast=True)
        elif DTYPE == 2:
            bits = single.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            word = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)
        else:
            word = single.to(tl.float16).to(tl.uint16, bitcast=True)
    return word


@triton.jit
def _note(word, is_there, factor, b, sum_place, flag_place, MASK: tl.constexpr):
    """Add what a block contributes to F, and note a value that is not finite."""
    total = tl.sum(tl.where(is_there, word.to(tl.uint64) + 1, 0) * b, 0) * factor
    tl.atomic_add(sum_place, total.to(tl.int64, bitcast=True))
    if MASK != 0:
        is_masked = is_there & ((word & MASK) == MASK)
        tl.atomic_or(flag_place, tl.max(is_masked.to(tl.int32), 0))


@triton.jit
def _take(
    source,
    tensors,
    moves,
    first_move,
    storages,
    lives,
    work,
    table,
    sums,
    flags,
    SENT: tl.constexpr,
    HELD: tl.constexpr,
    SENT_WORD: tl.constexpr,
    HELD_WORD: tl.constexpr,
    SENT_MASK: tl.constexpr,
    HELD_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    CHECKS: tl.constexpr,
    WRITES: tl.constexpr,
    FOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = work + tl.program_id(0).to(tl.int64) * 3
    tensor, first_block, num_blocks = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    span = tensors + tensor * 11
    begin, columns = tl.load(span), tl.load(span + 4)
    row_stride, column_stride = tl.load(span + 5), tl.load(span + 6)
    box_row, box_rows, box_column, box_columns = (
        tl.load(span + 7),
        tl.load(span + 8),
        tl.load(span + 9),
        tl.load(span + 10),
    )
    within = tl.arange(0, BLOCK)
    if CHECKS:
        b = tl.load(table + within).to(tl.uint64, bitcast=True)
    for nth in range(num_blocks):
        start = (first_block + nth) * BLOCK
        along = start % columns + within
        if not WIDE:  # a division of 64 bits takes many times as long
            along = along.to(tl.int32)
            columns_here = columns.to(tl.int32)
        else:
            columns_here = columns
        top, down = start // columns, along // columns_here
        right = along - down * columns_here
        y_box, x_box = top - box_row + down, right - box_column
        is_there = (y_box >= 0) & (y_box < box_rows) & (x_box >= 0) & (x_box < box_columns)
        place = source + begin + (y_box * row_stride + x_box * column_stride) * WIDTH
        sent = read_words(place, is_there, SENT_WORD, WIDTH, ALIGNED)
        held = sent
        if SENT != HELD:
            held = bits_of(values_of(sent, SENT), HELD)
        if CHECKS:
            factor = mix_odd((first_block + nth).to(tl.uint64) * 2)
            _note(sent, is_there, factor, b, sums + 2 * tensor, flags + 2 * tensor, SENT_MASK)
            if SENT != HELD:
                _note(held, is_there, factor, b, sums + 2 * tensor + 1, flags + 2 * tensor + 1, HELD_MASK)
        if WRITES:
            for number in range(tl.load(first_move + tensor), tl.load(first_move + tensor + 1)):
                move = moves + number * 11
                number_of_storage, offset = tl.load(move + 2), tl.load(move + 3)
                above, left = top - tl.load(move + 4), -tl.load(move + 6)
                num_rows, num_columns = tl.load(move + 5), tl.load(move + 7)
                if not WIDE:  # numbers of 64 bits take two registers
                    above, left = above.to(tl.int32), left.to(tl.int32)
                    num_rows, num_columns = num_rows.to(tl.int32), num_columns.to(tl.int32)
                y, x = above + down, left + right
                is_inside = (y >= 0) & (y < num_rows) & (x >= 0) & (x < num_columns) & is_there
                at = y.to(tl.int64) * tl.load(move + 8) + x.to(tl.int64) * tl.load(move + 9)
                word = held
                if FOLDS:
                    live = tl.load(lives + number_of_storage) + offset
                    word = held ^ tl.load(live.to(tl.pointer_type(HELD_WORD)) + at, mask=is_inside, other=0)
                storage = tl.load(storages + number_of_storage) + offset
                tl.store(storage.to(tl.pointer_type(HELD_WORD)) + at, word, mask=is_inside)


class _Form(NamedTuple):
    """Tensors of one compiled kernel: dtypes as sent and as held, and how their elements lie and are counted."""

    sent: int
    held: int
    is_aligned: bool
    is_wide: bool

    def constants(self, checks: bool, writes: bool, folds: bool) -> dict[str, Any]:
        dtypes = list(DTYPES.values())
        sent, held = dtypes[self.sent], dtypes[self.held]
        return {
            "SENT": self.sent,
            "HELD": self.held,
            "SENT_WORD": WORDS[sent.itemsize],
            "HELD_WORD": WORDS[held.itemsize],
            "SENT_MASK": EXPONENTS.get(sent, 0),
            "HELD_MASK": EXPONENTS.get(held, 0),
            "WIDTH": sent.itemsize,
            "ALIGNED": self.is_aligned,
            "WIDE": self.is_wide,
            "CHECKS": checks,
            "WRITES": writes,
            "FOLDS": folds,
            "BLOCK": BLOCK,
        }


class DeviceTables:
    """Tables of one layout on a device, to be taken for every bucket of the size of `source` that lies as they say.

    `storages`: uint8 [bytes] each, as large and aligned as the ones that will be written to; none of them is kept.
    Raises `RuntimeError` for a table that does not fit.
    """

    def __init__(self, source: torch.Tensor, storages: Sequence[torch.Tensor]) -> None:
        self._fits = _form_of(source, storages)
        self.device = source.device
        self._addresses: tuple[list[list[int]], list[torch.Tensor]] = ([], [])

    def fits(self, source: torch.Tensor, storages: Sequence[torch.Tensor]) -> bool:
        """Return whether the tables were checked for such a bucket and such storages."""
        return self._fits == _form_of(source, storages)

    def require_fit(
        self, source: torch.Tensor, storages: Sequence[torch.Tensor], live: Sequence[torch.Tensor] | None
    ) -> None:
        """Raise `RuntimeError` for a bucket or storages that the tables were not checked for."""
        if not (source.is_contiguous() and self.fits(source, storages if live is None else live)):
            raise RuntimeError(f"a bucket of {source.numel()} bytes is another than its tables describe")
        for shadow, storage in zip(storages, live or (), strict=live is not None):
            is_reached = shadow.device == self.device or shadow.is_pinned()
            if not (is_reached and _place_of(shadow)[:2] == _place_of(storage)[:2] and shadow.is_contiguous()):
                raise RuntimeError(f"a shadow of {shadow.numel()} bytes is not like its storage")

    def addresses_of(self, *lists: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the addresses in each list, int64 [S] on the device; they are copied there when they have changed.

        Each is a tensor of its own: Triton compiles a kernel anew for an argument at an odd address.
        """
        addresses = [[storage.data_ptr() for storage in storages] for storages in lists]
        if self._addresses[0] != addresses:
            made = [torch.tensor(row, dtype=torch.int64).to(self.device) for row in addresses]
            self._addresses = addresses, made
        return self._addresses[1]


class GpuSpans(DeviceTables):
    """The two tables of `take_spans` on a device, checked; see `DeviceTables`."""

    def __init__(
        self, source: torch.Tensor, tensors: torch.Tensor, moves: torch.Tensor, storages: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(source, storages)
        spans, steps = checked_tables(source, tensors, moves, storages)
        device = self.device
        steps.sort(key=lambda step: step.tensor)
        counts_T = torch.zeros(len(spans) + 1, dtype=torch.int64)
        for step in steps:
            counts_T[step.tensor + 1] += 1
        self._num_tensors = len(spans)
        self._tensors = on_device(device, spans, len(SpanTensor._fields))
        self._moves = on_device(device, steps, len(SpanMove._fields))
        self._first_move = counts_T.cumsum(0).to(device)
        self._work = {
            form: on_device(device, items, 3) for form, items in _work_of(spans, source.data_ptr() % 8).items()
        }
        self._same_T = torch.tensor([span.sent == span.held for span in spans], dtype=torch.bool, device=device)

    def take(
        self,
        source: torch.Tensor,
        storages: Sequence[torch.Tensor],
        checks: bool = True,
        writes: bool = True,
        live: Sequence[torch.Tensor] | None = None,
    ) -> Found:
        """Take a bucket into `storages`; return what the operator returns, on the device.

        `live`: the storages that are meant, where `storages` are to hold the exclusive or with them.  Raises
        `RuntimeError` for a bucket or storages that the tables were not checked for.
        """
        self.require_fit(source, storages, live)
        sums_T2 = torch.zeros(self._num_tensors, 2, dtype=torch.int64, device=self.device)
        flags_T2 = torch.zeros(self._num_tensors, 2, dtype=torch.int32, device=self.device)
        addresses = self.addresses_of(storages, storages if live is None else live)
        for form, items in self._work.items() if checks or writes else ():
            constants = form.constants(checks, writes, folds=live is not None)
            tables = (self._tensors, self._moves, self._first_move, *addresses, items)
            launch(source, tables, sums_T2, flags_T2, constants)
        for found_T2 in (sums_T2, flags_T2):  # a tensor that is not cast was summed once
            found_T2[:, 1] = torch.where(self._same_T, found_T2[:, 0], found_T2[:, 1])
        return sums_T2, flags_T2 != 0


def launch(
    source: torch.Tensor,
    tables: Sequence[torch.Tensor],
    sums_T2: torch.Tensor,
    flags_T2: torch.Tensor,
    constants: dict[str, Any],
) -> None:
    """Launch the kernel for the items of one form, the last of `tables`."""
    # Triton launches on the current device, and the bucket may lie on another.
    with torch.cuda.device(source.device) if source.is_cuda else nullcontext():
        _take[(tables[-1].shape[0],)](
            source, *tables, multipliers(str(source.device)), sums_T2, flags_T2, **constants, num_warps=_NUM_WARPS
        )


def _form_of(source: torch.Tensor, storages: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return what must stay for checked tables to hold; addresses may change."""
    return source.numel(), source.data_ptr() % 8, source.device, [_place_of(storage) for storage in storages]


def _place_of(storage: torch.Tensor) -> tuple[int, int, torch.device]:
    return storage.numel(), storage.data_ptr() % 8, storage.device


def on_device(device: torch.device, rows: Sequence[Sequence[int]], columns: int) -> torch.Tensor:
    """Return the rows of a table on a device."""
    return torch.tensor(rows, dtype=torch.int64).view(-1, columns).to(device)


def _work_of(spans: Sequence[SpanTensor], phase: int) -> dict[_Form, list[tuple[int, int, int]]]:
    """Return the items of each form: tensor, first block, number of blocks."""
    dtypes = list(DTYPES.values())
    found: dict[_Form, list[tuple[int, int, int]]] = {}
    for index, span in enumerate(spans):
        width = dtypes[span.sent].itemsize
        is_wide = max(span.rows, span.columns) > _NARROW
        form = _Form(span.sent, span.held, (phase + span.offset) % width == 0, is_wide)
        begin = span.first_row * span.columns // BLOCK
        end = -(-(span.first_row + span.num_rows) * span.columns // BLOCK) if 0 not in span.sizes else begin
        items = [(index, first, min(_ROWS, end - first)) for first in range(begin, end, _ROWS)]
        if items:
            found.setdefault(form, []).extend(items)
    return found


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, object], int, int]]:
    """Return the configurations of tensors as they are mostly sent, and one of each other path of the kernel."""
    arguments = ("tensors", "moves", "first_move", "storages", "lives", "work", "table", "sums")
    types = {"source": "*u8", **dict.fromkeys(arguments, "*i64"), "flags": "*i32"}
    names = list(DTYPES)
    code = names.index

    def form(sent: str, held: str) -> _Form:
        return _Form(code(sent), code(held), True, False)

    bf16, both = form("bfloat16", "bfloat16"), ("checks", "writes")
    forms = {
        **{f"spans_{name}": (form(name, name), both) for name in names},
        **{f"spans_{a}_as_{b}": (form(a, b), both) for a in names[:4] for b in names[:4] if a != b},
        **{f"spans_{name}_folded": (form(name, name), (*both, "folds")) for name in ("uint8", "bfloat16", "int64")},
        "spans_float32_as_bfloat16_folded": (form("float32", "bfloat16"), (*both, "folds")),
        "spans_unaligned": (bf16._replace(is_aligned=False), both),
        "spans_wide": (bf16._replace(is_wide=True), both),
        "spans_checked_only": (bf16, ("checks",)),
        "spans_unchecked": (bf16, ("writes",)),
    }
    return [
        (name, _take, types, one.constants(*(what in how for what in ("checks", "writes", "folds"))), _NUM_WARPS, 1)
        for name, (one, how) in forms.items()
    ]

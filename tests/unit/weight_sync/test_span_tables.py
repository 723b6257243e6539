"""Tables of `take_spans` that do not fit their source or storages: refused before anything is written."""

from __future__ import annotations

import pytest
import torch

from tests import kernels
from tests.unit.weight_sync.test_spans import FORMS, Taken, compiled, random_bytes, taken
from weight_sync.moves import MoveKind
from weight_sync.spans import DTYPE_CODES, INT8_BLOCKS_CODE, MOVE_COLUMNS, SpanMove, SpanTensor, table_of

CODE = DTYPE_CODES[torch.bfloat16]
FLOAT = DTYPE_CODES[torch.float32]
GOOD = SpanTensor.whole(offset=8, sent=CODE, held=CODE, rows=4, columns=6, row_stride=6, column_stride=1)
MOVE = SpanMove(0, MoveKind.BOX, 0, 4, 0, 4, 0, 6, a=6, b=1, c=0)
SOURCE_BYTES = 8 + 2 * 24
STORAGE_BYTES = 4 + 2 * 24
HUGE = 1 << 47

WRONG_TENSORS = {
    "begins too late": {"offset": 9},
    "too many rows": {"rows": 5, "num_rows": 5},
    "rows too far apart": {"row_stride": 7},
    "columns too far apart": {"column_stride": 2},
    "wider elements": {"sent": FLOAT, "held": FLOAT},
    "a negative offset": {"offset": -1},
    "a negative size": {"rows": -4, "num_rows": -4},
    "two negative sizes": {"num_rows": -4, "num_columns": -6},
    "a negative stride": {"row_stride": -6},
    "a stride whose product overflows": {"row_stride": (1 << 63) // 3 + 1},
    "a stride whose product overflows to zero": {"num_rows": 3, "row_stride": 1 << 62},
    "sizes whose product overflows": {"rows": HUGE, "columns": HUGE, "row_stride": 0, "column_stride": 0},
    "strides of nothing": {"rows": HUGE, "num_rows": HUGE, "row_stride": HUGE},
    "a box with too many rows": {"num_rows": 5, "row_stride": 1},
    "a box with too many columns": {"num_columns": 7, "row_stride": 1},
    "a box that begins too low": {"first_row": 2, "num_rows": 3},
    "a box that begins too far right": {"first_column": 2, "num_columns": 5},
    "a box before the tensor": {"first_row": -1, "num_rows": 2},
    "a box whose end overflows": {"first_row": (1 << 48) - 1},
    "an unknown dtype": {"sent": 13, "held": 13},
    "sent in 8 bits": {"sent": INT8_BLOCKS_CODE, "held": INT8_BLOCKS_CODE},
    "a cast from an integer to 8 bits": {"sent": DTYPE_CODES[torch.int16], "held": INT8_BLOCKS_CODE},
    "a negative dtype": {"sent": -1, "held": -1},
    "a cast to an integer": {"held": DTYPE_CODES[torch.int16]},
    "a cast from an integer": {"sent": DTYPE_CODES[torch.int16]},
    "a cast to FP8": {"held": DTYPE_CODES[torch.float8_e4m3fn]},
}
WRONG_MOVES = {
    "no such tensor": {"tensor": 1},
    "a negative tensor": {"tensor": -1},
    "no such storage": {"storage": 2},
    "a negative storage": {"storage": -1},
    "an unknown kind": {"kind": 99},
    "a negative kind": {"kind": -1},
    "begins too late": {"offset": 6},
    "begins before its storage": {"offset": -2},
    "between two elements": {"offset": 3},
    "too many rows": {"num_rows": 5},
    "too many columns": {"num_columns": 7},
    "rows behind the last": {"first_row": 1},
    "columns behind the last": {"first_column": 1},
    "a negative row": {"first_row": -1},
    "a negative size": {"num_rows": -1},
    "rows too far apart": {"a": 7},
    "columns too far apart": {"b": 2},
    "a negative stride": {"b": -1},
    "a stride whose product overflows": {"a": (1 << 63) // 3 + 1},
    "a stride whose product overflows to zero": {"num_rows": 3, "a": 1 << 62},
}
WRONG_PACKED = {
    "too many rows": {"a": 29},
    "an offset that is not below the step": {"c": 1},
    "no step": {"b": 0},
    "a step that is too large": {"b": 2},
    "begins too late": {"offset": 8},
    "rows whose product overflows": {"a": HUGE, "b": HUGE},
    "an overflow to zero": {"a": 1 << 46, "b": 1 << 22},
}


def refuses(take: Taken, tensor: SpanTensor, move: SpanMove, storage_bytes: int = STORAGE_BYTES) -> None:
    """Refuse the wrong row, and do not write the good row before it either."""
    storages = [random_bytes(storage_bytes, 1), random_bytes(storage_bytes, 2)]
    before = [storage.clone() for storage in storages]
    with pytest.raises(RuntimeError, match=r"^(tensor|move) [01] (has|is|lies|would|packs)"):
        taken(take, random_bytes(SOURCE_BYTES, 0), [tensor], [MOVE._replace(storage=1), move], storages)
    for storage, old in zip(storages, before, strict=True):
        assert torch.equal(storage, old)


@FORMS
def test_a_table_that_fits_to_the_last_byte_is_taken(take: Taken) -> None:
    source, storage = random_bytes(SOURCE_BYTES, 0), random_bytes(STORAGE_BYTES, 1)
    taken(take, source, [GOOD], [MOVE], [storage])
    assert torch.equal(storage[4:], source[8:])


@FORMS
@pytest.mark.parametrize("change", WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_a_wrong_row_of_tensors_is_refused(take: Taken, change: dict[str, int]) -> None:
    refuses(take, GOOD._replace(**change), MOVE)


@FORMS
@pytest.mark.parametrize("change", WRONG_MOVES.values(), ids=WRONG_MOVES)
def test_a_wrong_row_of_moves_is_refused(take: Taken, change: dict[str, int]) -> None:
    refuses(take, GOOD, MOVE._replace(**change))


def test_packed_rows_must_lie_in_their_storage() -> None:
    kernels.native_ops()
    tensor = SpanTensor.whole(0, FLOAT, FLOAT, 4, 3, 3, 1)
    panel = torch.ops.lockstep.empty_packed([], 32, 3, torch.float32).nbytes
    move = MOVE._replace(kind=MoveKind.PACKED, offset=4, num_columns=3, a=28, b=1, c=0)
    storage = torch.zeros(4 + panel, dtype=torch.uint8)
    taken(compiled, random_bytes(SOURCE_BYTES, 0), [tensor], [move], [storage])
    assert storage.any()
    good = MOVE._replace(storage=1, offset=0, num_columns=3, a=3)
    for change in WRONG_PACKED.values():
        storages = [torch.zeros(4 + panel, dtype=torch.uint8), torch.zeros(48, dtype=torch.uint8)]
        with pytest.raises(RuntimeError, match=r"^move 1 (has|lies)"):
            taken(compiled, random_bytes(SOURCE_BYTES, 0), [tensor], [good, move._replace(**change)], storages)
        assert not any(storage.any() for storage in storages)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(RuntimeError, match="move 0 packs dtype"):
            other = tensor._replace(sent=DTYPE_CODES[dtype], held=DTYPE_CODES[dtype])
            taken(compiled, random_bytes(96, 0), [other], [move._replace(offset=0)], [storage])


@FORMS
def test_tables_and_bytes_of_another_form_are_refused(take: Taken) -> None:
    source, storage = random_bytes(99, 0), random_bytes(99, 1)
    tensors, moves = torch.tensor([GOOD]), torch.tensor([MOVE])
    table = torch.arange(4096)
    for wrong in (
        (source.view(torch.int8), tensors, moves, [storage]),
        (source[::2], tensors, moves, [storage]),
        (source, tensors[:, :10], moves, [storage]),
        (source, tensors.int(), moves, [storage]),
        (source, tensors, moves[:, :10], [storage]),
        (source, tensors, moves.view(-1), [storage]),
        (source, tensors, moves, [storage.view(9, 11)]),
        (source, tensors, moves, [storage[:98].view(torch.int16)]),
    ):
        with pytest.raises(RuntimeError):
            take(*wrong, table, True, True)
    take(source, tensors, moves, [storage], table, True, True)


@pytest.mark.parametrize("rows", [[], [MOVE], [MOVE, MOVE._replace(offset=HUGE)]])
def test_a_table_has_the_numbers_of_its_rows(rows: list[SpanMove]) -> None:
    table = table_of(rows, MOVE_COLUMNS)
    assert table.dtype == torch.int64
    assert table.shape == (len(rows), MOVE_COLUMNS)
    assert table.tolist() == [list(row) for row in rows]


@pytest.mark.parametrize("rows", [[MOVE[:-1]], [MOVE, MOVE[:-1]], [(*MOVE, 0), MOVE[:-1]]])
def test_a_table_of_rows_of_another_length_is_refused(rows: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError):
        table_of(rows, MOVE_COLUMNS)

"""Matrices that are held in fewer bits for the Triton kernels: row by row, the scales of a row behind its elements.

    fp8     [ C elements float8_e4m3fn, to 16 bytes | a float32 for each 128 columns       | to 32 bytes ]
    int4    [ 32 bytes for each 64 columns          | two bfloat16 for each 64 columns     | to 32 bytes ]

A row has all that its products need, so that any rows make up a matrix and experts move with their scales.  Every row
of an FP8 block repeats the block's scales.  Integers of 4 bits lie plus 8: byte j of 64 columns has column j in its
lower half and column j + 32 in its upper half.

Shapes: R rows, C columns, S bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from rollout.kernels.places import PlaceBase
from weight_sync.fp8_blocks import BLOCK, QUANTISED
from weight_sync.held_format import FP8_PAIRS, INT4_GROUPS, INT4_GROUPS_128, HeldFormat, PairFormat
from weight_sync.moves import Move, MoveKind
from weight_sync.tensor_meta import Pair

PACKED_INT4 = torch.uint8
INT4_STEP = 64  # columns whose integers lie together
_INT4_GROUP = 32  # columns with a scale of their own, also where more of them have the same
_OFFSET = 8
_ALIGNMENT = 32  # bytes that memory transfers at once
_VECTOR = 16  # bytes that a thread loads at once


@dataclass(frozen=True)
class RowForm:
    """One way to hold matrices on CUDA.

    `held`: what is held of a tensor.  `kind`: of a move to rows.  `dtype`: of the storage, which tells the operators
    the form.
    `parts(columns)`: bytes of a row up to its scales, and of the scales.  `write(rows, pair)` and `read(rows, columns)`
    take storage [R, S] of that many rows.
    """

    held: HeldFormat
    kind: MoveKind
    dtype: torch.dtype
    parts: Callable[[int], tuple[int, int]]
    write: Callable[[torch.Tensor, Pair], None]
    read: Callable[[torch.Tensor, int], Pair]

    @property
    def pairs(self) -> PairFormat:
        """The pairs that are held."""
        assert self.held.pairs is not None, "rows have elements and scales"
        return self.held.pairs

    def empty(self, lead: Sequence[int], columns: int, device: torch.device | str) -> torch.Tensor:
        """Make the storage [*lead, S] of rows with that many columns."""
        return torch.zeros(*lead, row_bytes(*self.parts(columns)), dtype=torch.uint8, device=device).view(self.dtype)


class RowsPlace(PlaceBase):
    """Rows of a matrix in a `RowForm`, bit for bit as they come in a pair.  Values that come are quantised.

    `dtype`: of the values that are read.
    """

    def __init__(self, form: RowForm, rows: torch.Tensor, columns: int, dtype: torch.dtype) -> None:
        self._form = form
        self._rows = rows
        self._columns = columns
        self._dtype = dtype

    @property
    def storage(self) -> torch.Tensor:
        return self._rows

    @property
    def num_bytes(self) -> int:
        return self._rows.shape[0] * sum(self._form.parts(self._columns))

    def rebind(self, storage: torch.Tensor) -> RowsPlace:
        return RowsPlace(self._form, storage, self._columns, self._dtype)

    def write(self, source: torch.Tensor | Pair) -> None:
        """Store a pair, or quantise values and store them.  Raises `ContentError` for a value that is not finite."""
        pair = self._form.pairs.quantise(source) if isinstance(source, torch.Tensor) else source
        assert pair.shape == (self._rows.shape[0], self._columns), pair.shape
        device = self._rows.device
        self._form.write(self._rows, Pair(pair.weight.to(device), pair.scale.to(device), pair.block))

    def read(self) -> torch.Tensor:
        return self._form.pairs.values(self.saved(), self._dtype)

    def saved(self) -> Pair:
        return self._form.read(self._rows, self._columns)

    def restore(self, content: torch.Tensor | Pair) -> None:
        assert isinstance(content, Pair), "only a pair has all that is held"
        self.write(content)

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        rows, columns = self._rows.shape[0], self._columns
        assert tuple(shape) == (rows, columns) and lead in (None, 1), shape
        begin, row_bytes = (
            int(size) * self._rows.itemsize for size in (self._rows.storage_offset(), self._rows.stride(0))
        )
        up_to_scales, _ = self._form.parts(columns)
        return [Move(self._form.kind, self._rows, begin, 0, rows, 0, columns, row_bytes, up_to_scales)]


def row_bytes(elements: int, scales: int) -> int:
    """Return the bytes of a row, of the bytes of its parts."""
    return _up(elements + scales, _ALIGNMENT)


def fp8_parts(columns: int) -> tuple[int, int]:
    """Return the bytes of a row of FP8 up to its scales, and of the scales."""
    return _up(columns, _VECTOR), -(-columns // BLOCK) * torch.float32.itemsize


def int4_parts(columns: int) -> tuple[int, int]:
    """Return the bytes of a row of 4 bits up to its scales, and of the scales."""
    steps = -(-columns // INT4_STEP)
    return steps * INT4_STEP // 2, steps * INT4_STEP // _INT4_GROUP * torch.bfloat16.itemsize


def _scales(rows: torch.Tensor, parts: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a view of the scales [R, scales of a row]."""
    return rows.view(torch.uint8)[:, parts[0] : sum(parts)].view(dtype)


def _write_fp8(rows: torch.Tensor, pair: Pair) -> None:
    count, columns = pair.shape
    rows[:, :columns] = pair.weight
    rows.view(torch.uint8)[:, columns : fp8_parts(columns)[0]] = 0
    scale_Rc = pair.scale.float().repeat_interleave(BLOCK, 0)[:count]
    _scales(rows, fp8_parts(columns), torch.float32).copy_(scale_Rc)


def _read_fp8(rows: torch.Tensor, columns: int) -> Pair:
    scale_Rc = _scales(rows, fp8_parts(columns), torch.float32)
    return Pair(rows[:, :columns].clone(), scale_Rc[::BLOCK].clone())


def _write_int4(rows: torch.Tensor, pair: Pair) -> None:
    count, columns = pair.shape
    parts, half = int4_parts(columns), INT4_STEP // 2
    integers_RC = pad(pair.weight, (0, -columns % INT4_STEP)) + _OFFSET
    both_Rs2h = integers_RC.to(torch.uint8).view(count, -1, 2, half)
    rows[:, : parts[0]] = (both_Rs2h[:, :, 0] | both_Rs2h[:, :, 1] << 4).flatten(1)
    scale_Rg = pair.scale.repeat_interleave(pair.block[1] // _INT4_GROUP, 1)
    scales_Rg = _scales(rows, parts, torch.bfloat16)
    width = min(scales_Rg.shape[1], scale_Rg.shape[1])
    scales_Rg[:, :width] = scale_Rg[:, :width]
    scales_Rg[:, width:] = 0


def _read_int4(rows: torch.Tensor, columns: int, group: int) -> Pair:
    parts, half = int4_parts(columns), INT4_STEP // 2
    bytes_Rsh = rows[:, : parts[0]].unflatten(1, (-1, half))
    both_Rs2h = torch.stack((bytes_Rsh & 15, bytes_Rsh >> 4), 2).to(torch.int8)
    weight_RC = both_Rs2h.flatten(1)[:, :columns] - _OFFSET
    every = group // _INT4_GROUP
    scale_Rg = _scales(rows, parts, torch.bfloat16)[:, : -(-columns // _INT4_GROUP) : every]
    return Pair(weight_RC.contiguous(), scale_Rg.clone(), (1, group))


def _int4_form(held: HeldFormat) -> RowForm:
    group = held.block[1]
    return RowForm(
        held,
        MoveKind.ROWS_INT4,
        PACKED_INT4,
        int4_parts,
        _write_int4,
        lambda rows, columns: _read_int4(rows, columns, group),
    )


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def _asked_for(name: str, held: HeldFormat) -> HeldFormat:
    return replace(held, flag=f"--quantization {name}")


ROW_FORMS = {
    "fp8": RowForm(_asked_for("fp8", FP8_PAIRS), MoveKind.ROWS_FP8, QUANTISED, fp8_parts, _write_fp8, _read_fp8),
    "int4": _int4_form(_asked_for("int4", INT4_GROUPS)),
    "int4-128": _int4_form(_asked_for("int4-128", INT4_GROUPS_128)),
}
"""By the value of `--quantization`; the formats of a CPU are `held_places.HELD_FORMS`."""

"""Matrices that are held in fewer bits than bfloat16: their places, and `HELD_FORMS`, one a format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollout.kernels.places import PackedRows
from weight_sync.errors import ContentError
from weight_sync.held_format import FP8_PAIRS, INT4_GROUPS, INT4_GROUPS_128, INT8_BLOCKS, HeldFormat, PairFormat
from weight_sync.int8_blocks import BLOCK
from weight_sync.moves import Move, MoveKind, packed_move
from weight_sync.tensor_meta import Pair, Place

_STEP = 32
"""Elements of a packed row that have a scale of their own in `csrc/packed_held.h`."""
_VECTOR = 16
"""Packed rows that share a scale of FP8 there."""


@dataclass(frozen=True)
class HeldForm:
    """One way to hold matrices on a CPU.

    `held`: what is held of a tensor.  `empty(lead, rows, columns)`: the storage of packed matrices, whose dtype tells
    the operators the form.  `place(packed, rows, columns, step, offset)`: the place of a matrix in one, in `rows` of
    it.  `row_grain`: the first of them is a multiple of it.
    """

    held: HeldFormat
    empty: Callable[[list[int], int, int], torch.Tensor]
    place: Callable[[torch.Tensor, range, int, int, int], Place]
    row_grain: int = 1


class W8Place(PackedRows):
    """Rows of a bfloat16 matrix packed in 8 bits (`kernels/csrc/packed_w8.h`), quantised as they are written.

    Its content is the quantised values (`weight_sync.int8_blocks`), which may be written again without a change.
    """

    @property
    def num_bytes(self) -> int:
        return len(self._rows) * (self._in_features + -(-self._in_features // BLOCK))

    def rebind(self, storage: torch.Tensor) -> W8Place:
        return W8Place(storage, self._rows, self._in_features, *self._layout)

    def write(self, source: torch.Tensor | Pair) -> None:
        """Quantise and pack the source.  Raises `ContentError` for a value that is not finite."""
        assert isinstance(source, torch.Tensor), "it has no pairs"
        assert source.shape == (len(self._rows), self._in_features), source.shape
        values = source.to(device=self._packed.device, dtype=torch.bfloat16)
        if not bool(values.isfinite().all()):
            raise ContentError("values that are not finite cannot be quantised")
        torch.ops.lockstep.pack_rows_w8(self._packed, values, self._rows.start, *self._layout)

    def read(self) -> torch.Tensor:
        unpack: Callable[..., torch.Tensor] = torch.ops.lockstep.unpack_rows_w8
        return unpack(self._packed, self._in_features, self._rows.start, len(self._rows), *self._layout)

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        rows, columns = len(self._rows), self._in_features
        assert tuple(shape) == (rows, columns) and lead in (None, 1), shape
        return [packed_move(MoveKind.PACKED_W8, self._packed, rows, columns, self._rows.start, *self._layout)]


@dataclass(frozen=True)
class PairPacking:
    """The operators that pack pairs of one kind (`csrc/packed_held.h`), in the form in which scales are stored there.

    `pack(packed, pair, first_row, step, offset)`; `unpack(packed, columns, rows, step, offset)`.  `kind`: of the move
    that does what `pack` does.  `bytes_of(rows, columns)`: of a matrix without padding.
    """

    pairs: PairFormat
    kind: MoveKind
    pack: Callable[[torch.Tensor, Pair, int, int, int], None]
    unpack: Callable[[torch.Tensor, int, range, int, int], Pair]
    bytes_of: Callable[[int, int], int]


class PairPlace(PackedRows):
    """Rows of a matrix packed as elements and scales, bit for bit as they come in a pair.

    Values that come are quantised.
    """

    def __init__(
        self, packing: PairPacking, packed: torch.Tensor, rows: range, in_features: int, step: int = 1, offset: int = 0
    ) -> None:
        super().__init__(packed, rows, in_features, step, offset)
        self._packing = packing

    @property
    def num_bytes(self) -> int:
        return self._packing.bytes_of(len(self._rows), self._in_features)

    def rebind(self, storage: torch.Tensor) -> PairPlace:
        return PairPlace(self._packing, storage, self._rows, self._in_features, *self._layout)

    def write(self, source: torch.Tensor | Pair) -> None:
        """Pack a pair, or quantise values and pack them.  Raises `ContentError` for a value that is not finite."""
        pair = self._packing.pairs.quantise(source.bfloat16()) if isinstance(source, torch.Tensor) else source
        assert pair.shape == (len(self._rows), self._in_features), pair.shape
        self._packing.pack(self._packed, pair, self._rows.start, *self._layout)

    def read(self) -> torch.Tensor:
        return self._packing.pairs.values(self.saved(), torch.bfloat16)

    def saved(self) -> Pair:
        return self._packing.unpack(self._packed, self._in_features, self._rows, *self._layout)

    def restore(self, content: torch.Tensor | Pair) -> None:
        assert isinstance(content, Pair), "only a pair has all that is held"
        self.write(content)

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        rows, columns = len(self._rows), self._in_features
        assert tuple(shape) == (rows, columns) and lead in (None, 1), shape
        return [packed_move(self._packing.kind, self._packed, rows, columns, self._rows.start, *self._layout)]


def _pack_fp8(packed: torch.Tensor, pair: Pair, first_row: int, step: int, offset: int) -> None:
    torch.ops.lockstep.pack_rows_fp8(packed, pair.weight, pair.scale.float(), first_row, step, offset)


def _unpack_fp8(packed: torch.Tensor, columns: int, rows: range, step: int, offset: int) -> Pair:
    return Pair(*torch.ops.lockstep.unpack_rows_fp8(packed, columns, rows.start, len(rows), step, offset))


def _int4_packing(pairs: PairFormat, group: int) -> PairPacking:
    def pack(packed: torch.Tensor, pair: Pair, first_row: int, step: int, offset: int) -> None:
        steps, each = -(-pair.shape[1] // _STEP), pair.block[1] // _STEP
        scale_Rs = pair.scale.repeat_interleave(each, 1)[:, :steps] if each > 1 else pair.scale
        torch.ops.lockstep.pack_rows_int4(packed, pair.weight, scale_Rs, first_row, step, offset)

    def unpack(packed: torch.Tensor, columns: int, rows: range, step: int, offset: int) -> Pair:
        found = torch.ops.lockstep.unpack_rows_int4(packed, columns, rows.start, len(rows), step, offset)
        weight, scale_Rs = found
        return Pair(weight, scale_Rs[:, :: group // _STEP], (1, group))

    def bytes_of(rows: int, columns: int) -> int:
        return rows * (-(-columns // 2) + -(-columns // _STEP) * torch.bfloat16.itemsize)

    return PairPacking(pairs, MoveKind.PACKED_INT4, pack, unpack, bytes_of)


def _fp8_bytes(rows: int, columns: int) -> int:
    return rows * columns + -(-rows // _VECTOR) * -(-columns // _STEP) * torch.float32.itemsize


def _pair_form(held: HeldFormat, packing: PairPacking, operator: str, row_grain: int = 1) -> HeldForm:
    def empty(lead: list[int], rows: int, columns: int) -> torch.Tensor:
        packed: torch.Tensor = getattr(torch.ops.lockstep, operator)(lead, rows, columns)
        return packed

    return HeldForm(held, empty, lambda *place: PairPlace(packing, *place), row_grain)


def _int4_form(held: HeldFormat) -> HeldForm:
    assert held.pairs is not None, "integers of 4 bits have scales"
    return _pair_form(held, _int4_packing(held.pairs, held.block[1]), "empty_packed_int4")


def _fp8_form() -> HeldForm:
    assert FP8_PAIRS.pairs is not None, "FP8 has scales"
    packing = PairPacking(FP8_PAIRS.pairs, MoveKind.PACKED_FP8, _pack_fp8, _unpack_fp8, _fp8_bytes)
    return _pair_form(FP8_PAIRS, packing, "empty_packed_fp8", _VECTOR)


def _empty_w8(lead: list[int], rows: int, columns: int) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.lockstep.empty_packed_w8(lead, rows, columns)
    return packed


HELD_FORMS = {
    "w8": HeldForm(INT8_BLOCKS, _empty_w8, W8Place),
    "fp8": _fp8_form(),
    "int4": _int4_form(INT4_GROUPS),
    "int4-128": _int4_form(INT4_GROUPS_128),
}
"""By the value of `--cpu-weight-format` and `--cpu-linear-format`."""

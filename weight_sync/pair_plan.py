"""`PlannedPairs`: the quantised weights of a layout, as rows of `take_pairs`.

A weight is planned where all of it lies in the layout as one tensor or one set of parts, and the model takes it as one
matrix.  Parts that came in another bucket are put behind the bucket that makes their weight whole (`SplitWeights`), at
the price of a copy of that.  Others go tensor by tensor: boxes, FP8 of fused experts, and what is to be refused.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from weight_sync import fp8_blocks
from weight_sync.assembly import PairedTensors
from weight_sync.content import TensorTable
from weight_sync.errors import WeightRequestError
from weight_sync.held_format import HeldFormats
from weight_sync.ledger import Numbers
from weight_sync.moves import ROW_KINDS, Move, MoveKind
from weight_sync.pair_kinds import FP8, PairKind, group_of
from weight_sync.pair_tables import PairForm, PairRow
from weight_sync.paired_wire import WirePart, parts_in, value_metas
from weight_sync.spans import CAST_DTYPES, DTYPE_CODES, MOVE_COLUMNS, SpanMove
from weight_sync.splitting import split_wire
from weight_sync.take_pairs import PairTables
from weight_sync.tensor_meta import BucketLayout, LogicalWeights, PackedBucket, Piece, TensorMeta

_VECTOR = 16
"""Packed rows that share a scale of FP8."""


class PartAt(NamedTuple):
    """A part of a weight: its place in the layout, and the byte where it begins."""

    place: int
    meta: TensorMeta
    offset: int


Gathered = Mapping[str, PartAt]
"""The parts of one weight, by suffix."""


class Wires(NamedTuple):
    """The wire tensors of a call.  `pieces`: the logical tensors in each; of weights in parts, in their values.

    `parts`: the ones that are parts of weights.  `weights`: the pieces of these weights, by name.
    """

    pieces: Mapping[TensorMeta, Sequence[Piece]]
    parts: Mapping[TensorMeta, WirePart]
    weights: Mapping[str, Sequence[Piece]]

    @classmethod
    def of(cls, weights: LogicalWeights, metas: Sequence[TensorMeta], cast: bool) -> Wires:
        """Return the tensors of a call, checked.  Raises as `value_metas` and `split_wire`."""
        parts = parts_in(weights, metas)
        values = value_metas(weights, metas, parts)
        pieces = dict(zip(values, split_wire(weights, values, cast), strict=True))
        names = {part.name for part in parts.values()}
        return cls(pieces, parts, {meta.name: found for meta, found in pieces.items() if meta.name in names})

    def gathered(self, layout: BucketLayout) -> dict[str, Gathered]:
        """Return the parts of each weight of which all lie in a layout, once, by its name."""
        found: dict[str, dict[str, PartAt]] = {}
        counts: Counter[str] = Counter()
        kinds: dict[str, PairKind] = {}
        for place, (meta, offset) in enumerate(zip(layout.metas, layout.offsets, strict=True)):
            part = self.parts.get(meta)
            if part is not None:
                found.setdefault(part.name, {})[part.suffix] = PartAt(place, meta, offset)
                kinds[part.name] = part.kind
                counts[part.name] += 1
        return {
            name: {suffix: own[suffix] for suffix in kinds[name].suffixes}
            for name, own in found.items()
            if own.keys() == set(kinds[name].suffixes) and counts[name] == len(own)
        }


class SplitWeights:
    """The weights of which a layout has some parts, and the layouts with the other parts behind it.

    Holds no layout that it is of.
    """

    def __init__(self, weights: LogicalWeights, layout: BucketLayout) -> None:
        found: dict[str, tuple[PairKind, list[str]]] = {}
        parts = parts_in(weights, layout.metas)
        for meta in layout.metas if parts else ():
            part = parts.get(meta)
            if part is not None and meta.box is None:
                found.setdefault(part.name, (part.kind, []))[1].append(part.suffix)
        self._present = {name: (kind, own) for name, (kind, own) in found.items() if len(own) < len(kind.suffixes)}
        self._joined: tuple[tuple[TensorMeta, ...], BucketLayout] | None = None  # of the last refresh

    def join(self, bucket: PackedBucket, pairs: PairedTensors) -> PackedBucket:
        """Return the bucket with the parts that wait of its weights, which no longer wait; or as it is."""
        parts = pairs.take_rest(self._present) if self._present else []
        if not parts:
            return bucket
        layout, content = bucket
        metas = tuple(TensorMeta(name, part.dtype, tuple(part.shape)) for name, part in parts)
        if self._joined is None or self._joined[0] != metas:
            *offsets, size = itertools.accumulate((meta.nbytes for meta in metas), initial=layout.num_bytes)
            self._joined = metas, BucketLayout([*layout.metas, *metas], [*layout.offsets, *offsets], size)
        more = (part.contiguous().view(-1).view(torch.uint8).to(content.device) for _, part in parts)
        return PackedBucket(self._joined[1], torch.cat([content, *more]))


@dataclass(frozen=True, eq=False)
class PlannedPairs:
    """Q weights, of which the first V came as values, and the others in parts.

    `numbers` [Q].  `names`, `wire_names` [Q].  `codes` [V]: dtypes as sent.  `parts` [Q - V]: the tensors of each, in
    the order of their kind, named after the logical tensor.  `places` [Q]: of the tensors of each in the layout.
    """

    numbers: Numbers
    names: Sequence[str]
    wire_names: Sequence[str]
    codes: np.ndarray
    parts: Sequence[tuple[TensorMeta, ...]]
    places: Sequence[tuple[int, ...]]
    tables: PairTables

    @property
    def num_values(self) -> int:
        return len(self.codes)

    def of(self, chosen: np.ndarray) -> tuple[list[str], list[int]]:
        """Return the names of some weights, and the places of all of their parts.  `chosen` [Q]: not 0 for these.

        A tensor with several of them has one place.
        """
        found = np.flatnonzero(chosen).tolist()
        places = dict.fromkeys(place for at in found for place in self.places[at])
        return [self.names[at] for at in found], list(places)


class _Row(NamedTuple):
    held: TensorMeta
    wire_name: str
    parts: tuple[TensorMeta, ...]
    places: tuple[int, ...]
    row: PairRow
    moves: Sequence[Move]
    is_limited: bool


@dataclass
class PairRows:
    """The weights of a plan, as they are found.  `kinds`: of the moves that its kernel knows."""

    table: TensorTable
    quantised: HeldFormats
    kinds: Collection[MoveKind]
    values: list[_Row] = field(default_factory=list)
    parts: list[_Row] = field(default_factory=list)

    @property
    def rows(self) -> list[_Row]:
        """The rows in the order of the table."""
        return [*self.values, *self.parts]

    def add_values(
        self, wire: TensorMeta, place: int, found: Sequence[tuple[TensorMeta, int]], moves: Sequence[Sequence[Move]]
    ) -> bool:
        """Add the logical tensors of wire tensor number `place`, with the byte where each begins.

        Returns false where tables cannot quantise one of them.
        """
        rows = []
        for (held, offset), own in zip(found, moves, strict=True):
            form = self._form_of(held, in_parts=False)
            if form is None or wire.dtype not in CAST_DTYPES:
                return False
            row = _row(held, form, offset, PairForm.VALUES, wire.dtype)
            rows.append(_Row(held, wire.name, (), (place,), row, own, is_limited=False))
        if not all(map(self._fits_moves, rows)):
            return False
        self.values += rows
        return True

    def add_parts(self, part: WirePart, gathered: Gathered, piece: Piece, moves: Sequence[Move]) -> bool:
        """Add a weight that came in parts as the logical tensor `piece`; false where tables cannot take it."""
        held = self.table.metas[self.table.number_of[piece.name]]
        form = self._form_of(held, in_parts=True)
        is_whole = piece == Piece(piece.name) and all(own.meta.box is None for own in gathered.values())
        if form is None or not is_whole:
            return False
        make = _of_fp8 if part.kind is FP8 else _of_int4
        row = make(gathered, part.name, held, form)
        if row is None:
            return False
        metas = tuple(
            TensorMeta(held.name + suffix, own.meta.dtype, own.meta.shape) for suffix, own in gathered.items()
        )
        places = tuple(own.place for own in gathered.values())
        added = _Row(held, part.name, metas, places, row, moves, is_limited=row.form == row.held)
        if not self._fits_moves(added):
            return False
        self.parts.append(added)
        return True

    def planned(self, number_of: Callable[[torch.Tensor], int]) -> PlannedPairs | None:
        """Return the plan of all that was added.  `number_of`: of the storage behind a tensor."""
        rows = self.rows
        if not rows:
            return None
        moves = [SpanMove.of(move, at, number_of(move.storage)) for at, each in enumerate(rows) for move in each.moves]
        table = torch.tensor(moves, dtype=torch.int64).view(-1, MOVE_COLUMNS)
        return PlannedPairs(
            numbers=np.array([self.table.number_of[each.held.name] for each in rows], dtype=np.int64),
            names=[each.held.name for each in rows],
            wire_names=[each.wire_name for each in rows],
            codes=np.array([each.row.sent for each in self.values], dtype=np.uint8),
            parts=[each.parts for each in self.parts],
            places=[each.places for each in rows],
            tables=PairTables([each.row for each in rows], table, [each.is_limited for each in rows]),
        )

    def _fits_moves(self, row: _Row) -> bool:
        return all(move.kind in self.kinds for move in row.moves) and _begins_with_blocks(row)

    def _form_of(self, held: TensorMeta, *, in_parts: bool) -> tuple[PairForm, int] | None:
        """Return the form in which a tensor is held, and its group; None where tables cannot hold it so."""
        if len(held.shape) != 2 or not held.numel or held.dtype not in CAST_DTYPES:
            return None
        held_format = self.quantised.get(held.name)
        if held_format is None or (in_parts and not held_format.of_pairs):
            return PairForm.VALUES, 0
        if held_format.is_int8_blocks and held.dtype != torch.bfloat16:
            return None
        return held_format.form, held_format.block[1]


def _row(
    held: TensorMeta,
    as_held: tuple[PairForm, int],
    offset: int,
    form: PairForm,
    sent: torch.dtype,
    scales: int = 0,
    shape: int = 0,
    group: int = 0,
) -> PairRow:
    (rows, columns), values = held.shape, DTYPE_CODES[held.dtype]
    return PairRow(offset, form, DTYPE_CODES[sent], scales, shape, group, rows, columns, values, *as_held)


def _of_fp8(parts: Gathered, name: str, held: TensorMeta, as_held: tuple[PairForm, int]) -> PairRow | None:
    weight, scale = parts.values()
    is_right = weight.meta.shape == held.shape and scale.meta.shape == fp8_blocks.scale_shape(held.shape)
    if not is_right or scale.meta.dtype not in fp8_blocks.SCALE_DTYPES:
        return None
    return _row(held, as_held, weight.offset, PairForm.FP8, scale.meta.dtype, scale.offset)


def _of_int4(parts: Gathered, name: str, held: TensorMeta, as_held: tuple[PairForm, int]) -> PairRow | None:
    words, scale, shape = parts.values()
    try:
        group = group_of(name, words.meta.shape, scale.meta.shape)
    except WeightRequestError:
        return None
    if as_held[0] == PairForm.INT4 and group % as_held[1]:
        return None
    return _row(held, as_held, words.offset, PairForm.INT4, shape.meta.dtype, scale.offset, shape.offset, group)


def _begins_with_blocks(row: _Row) -> bool:
    """Return whether no move of elements and scales begins inside a block."""
    for move in row.moves:
        if move.kind == MoveKind.PACKED_FP8:
            if move.first_row % fp8_blocks.BLOCK or move.first_column % fp8_blocks.BLOCK or move.a % _VECTOR:
                return False
        elif move.kind == MoveKind.PACKED_INT4 and move.first_column % row.row.held_group:
            return False
        elif move.kind in ROW_KINDS:  # of INT4 128 columns lie together, whatever their groups
            is_cut = move.kind == MoveKind.ROWS_FP8 and move.first_row % fp8_blocks.BLOCK != 0
            if is_cut or move.first_column % fp8_blocks.BLOCK:
                return False
    return True

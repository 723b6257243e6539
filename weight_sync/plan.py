"""`BucketPlan`: what becomes of the tensors of one layout, worked out once and replayed for each bucket of it.

    layout -> wire tensors checked and split -> logical tensors -> their places on this rank -> tables of numbers

`take_spans` (`spans`) reads the tables.  It copies, converts and checks a bucket without a step for each tensor.
Tensors that the tables cannot express are listed in `rest`, and go the way of single tensors (`intake`): halves of FP8
pairs, tensors that are quantised to FP8 here, and places that only their own `write` can fill.

A plan is of one layout, one state of the places (`LogicalWeights.places_key`), and one answer to whether casts that
lose something are taken (`planner`).  Memory: about 300 bytes a tensor and place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from weight_sync.bucket_layout import BucketLayout
from weight_sync.content import TensorTable
from weight_sync.fp8_wire import weight_name
from weight_sync.held_format import INT8_BLOCKS, HeldFormats
from weight_sync.ledger import Numbers
from weight_sync.moves import Move, lead_of, matrix_of, two_strides
from weight_sync.spans import (
    CAST_DTYPES,
    DTYPE_CODES,
    INT8_BLOCKS_CODE,
    MOVE_COLUMNS,
    TENSOR_COLUMNS,
    SpanMove,
    SpanTensor,
)
from weight_sync.take_spans import SpanTables
from weight_sync.tensor_meta import LogicalWeights, Piece, Place, TensorMeta


class Homes:
    """The places of logical tensors on this rank, asked once for one state of the places."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights
        self._places: dict[str, Sequence[Place]] = {}
        self._resident_bytes: dict[int, int] | None = None

    def places(self, name: str) -> Sequence[Place]:
        """Return the places of a tensor."""
        found = self._places.get(name)
        if found is None:
            found = self._places[name] = self._weights.places(name)
        return found

    def moves(self, name: str) -> tuple[list[Move], int] | None:
        """Return the moves of a tensor to all of its places, and how many of its dimensions are rows of their matrix.

        None where only the places themselves can write it.
        """
        shape, found = self._weights.metas()[name].shape, list[Move]()
        places = self.places(name)
        for place in places:
            moves = place.moves(shape)
            if moves is None:
                return None
            found += moves
        region = places[0].region if places else None
        return found, lead_of(None if region is None else region.dim)

    @property
    def device(self) -> torch.device | None:
        """The device of the weights; None for a rank that holds none."""
        places = (place for name in self._weights.metas() for place in self.places(name))
        first = next(places, None)
        return None if first is None else first.storage.device

    def has_gaps(self, storage: torch.Tensor) -> bool:
        """Return whether the whole storage behind `storage` holds anything but content of tensors."""
        if self._resident_bytes is None:
            self._resident_bytes = {}
            for name in self._weights.metas():
                for place in self.places(name):
                    key = address_of(place.storage)
                    self._resident_bytes[key] = self._resident_bytes.get(key, 0) + place.num_bytes
        return self._resident_bytes.get(address_of(storage), 0) != storage.untyped_storage().nbytes()


def address_of(storage: torch.Tensor) -> int:
    """Return the address of the whole storage behind a tensor."""
    return storage.untyped_storage().data_ptr()


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """T logical tensors of a layout, by number and name, and M moves of them.

    `wire_names`: of the tensors whose parts they are.  `codes`: their dtypes as sent, of `DTYPE_CODES`.
    `tables`: of these tensors and moves.  `storages`: a tensor of each storage that the moves go to.  `rest`: places in
    the layout of the wire tensors that are not planned.
    """

    numbers: Numbers
    names: Sequence[str]
    wire_names: Sequence[str]
    codes: np.ndarray
    tables: SpanTables
    storages: Sequence[torch.Tensor]
    rest: Sequence[int]


def plan_bucket(
    layout: BucketLayout,
    pieces: Mapping[TensorMeta, Sequence[Piece]],
    homes: Homes,
    table: TensorTable,
    quantised: HeldFormats,
) -> BucketPlan:
    """Return the plan of a layout.  `pieces`: the logical tensors in each wire tensor, but for halves of pairs."""
    rows, rest, seen = _Rows(table, quantised), [], set[str]()
    halves = {weight_name(wire.name) for wire in layout.metas if wire not in pieces}
    for place, (wire, offset) in enumerate(zip(layout.metas, layout.offsets, strict=True)):
        parts = pieces.get(wire)
        names = {part.name for part in parts or ()}
        is_plain = (
            parts is not None
            and wire.name not in halves
            and seen.isdisjoint(names)
            and quantised.keys().isdisjoint(names)
        )
        if not (is_plain and rows.add(wire, offset, parts or (), homes)):
            rest.append(place)
        seen |= names
    return rows.plan(rest)


@dataclass
class _Rows:
    """The rows of a plan's tables, as they are made."""

    table: TensorTable
    quantised: HeldFormats
    numbers: list[int] = field(default_factory=list)
    wire_names: list[str] = field(default_factory=list)
    tensors: list[SpanTensor] = field(default_factory=list)
    moves: list[SpanMove] = field(default_factory=list)
    storages: list[torch.Tensor] = field(default_factory=list)
    _numbers_of_storages: dict[int, int] = field(default_factory=dict)

    def add(self, wire: TensorMeta, offset: int, pieces: Sequence[Piece], homes: Homes) -> bool:
        """Add the logical tensors of a wire tensor that begins at byte `offset`.  False: tables cannot express them."""
        found = []
        for piece in pieces:
            held = self.table.metas[self.table.number_of[piece.name]]
            to, code = homes.moves(piece.name), self._code_of(wire, held)
            matrix = None if to is None else _matrix(wire, offset, piece, held.shape, to[1])
            if to is None or matrix is None or code is None:
                return False
            found.append((held, code, matrix, to[0]))
        for held, code, matrix, moves in found:
            number = self.table.number_of[held.name]
            self.numbers.append(number)
            self.wire_names.append(wire.name)
            for move in moves:
                self.moves.append(SpanMove.of(move, len(self.tensors), self._number_of(move.storage)))
            start, *sizes_and_strides = matrix
            self.tensors.append(SpanTensor(start, DTYPE_CODES[wire.dtype], code, *sizes_and_strides))
        return True

    def plan(self, rest: Sequence[int]) -> BucketPlan:
        """Return the plan of all that was added.  `rest`: places in the layout that were not."""
        tensors = torch.tensor(self.tensors, dtype=torch.int64).view(-1, TENSOR_COLUMNS)
        return BucketPlan(
            numbers=np.array(self.numbers, dtype=np.int64),
            names=[self.table.names[number] for number in self.numbers],
            wire_names=self.wire_names,
            codes=tensors[:, 1].numpy().astype(np.uint8),
            tables=SpanTables(tensors, torch.tensor(self.moves, dtype=torch.int64).view(-1, MOVE_COLUMNS)),
            storages=self.storages,
            rest=rest,
        )

    def _code_of(self, wire: TensorMeta, held: TensorMeta) -> int | None:
        """Return the code of a tensor's dtype as it is held; None where `take_spans` cannot convert to it."""
        is_cast = wire.dtype in CAST_DTYPES and held.dtype in CAST_DTYPES
        held_format = self.quantised.get(held.name)
        if held_format is None:
            return DTYPE_CODES[held.dtype] if is_cast or wire.dtype == held.dtype else None
        return INT8_BLOCKS_CODE if held_format is INT8_BLOCKS and is_cast else None

    def _number_of(self, storage: torch.Tensor) -> int:
        number = self._numbers_of_storages.setdefault(address_of(storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number


def _matrix(
    wire: TensorMeta, offset: int, piece: Piece, shape: Sequence[int], lead: int
) -> tuple[int, int, int, int, int] | None:
    """Return first byte, rows, columns, and their strides in elements, of a piece as a matrix.

    None if no matrix has its strides in the wire tensor, or its dtype cannot be read from there.
    """
    if offset % wire.dtype.itemsize:
        return None
    rows, columns = matrix_of(shape, lead)
    if piece.index == () and not piece.transposed:
        return offset, rows, columns, columns, 1
    view = piece.of(torch.empty(wire.shape, dtype=wire.dtype, device="meta"))
    strides = two_strides(view.shape, view.stride(), lead)
    if strides is None:
        return None
    return offset + int(view.storage_offset()) * wire.dtype.itemsize, rows, columns, *strides

"""`BucketPlan`: what becomes of the tensors of one layout, worked out once and replayed for each bucket of it.

`Planner` keeps the plans of what one sender sends in each refresh, from one to the next.

    layout -> wire tensors checked and split -> logical tensors -> their places on this rank -> tables of numbers

`take_spans` (`spans`) reads the tables.  It copies, converts and checks a bucket without a step for each tensor.  A
wire tensor may come as a box of it (`TensorMeta.box`).  Then so do the logical tensors in it, unless they lie in the
box as a whole.

Weights that come in parts, or that are quantised here, have tables of their own (`pair_plan`).  Tensors that no table
can express are listed in `rest`, and go the way of single tensors (`intake`): parts that wait for others, boxes
of quantised tensors, and places that only their own `write` can fill.

A plan is of one layout, one state of the places (`LogicalWeights.places_key`), and one answer to whether casts that
lose something are taken.  Memory: about 430 bytes a tensor that has one place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from weight_sync.assembly import PairedTensors
from weight_sync.boxes import Box, box_text
from weight_sync.content import TensorTable
from weight_sync.errors import CoverageError
from weight_sync.held_format import HeldFormats
from weight_sync.homes import Homes, address_of
from weight_sync.known_calls import KnownCalls, without_collections
from weight_sync.ledger import Numbers, PlannedBoxes
from weight_sync.manifest import Manifest, ManifestPlan, plan_manifest
from weight_sync.moves import Move
from weight_sync.pair_plan import Gathered, PairRows, PlannedPairs, SplitWeights, Wires
from weight_sync.paired_wire import WirePart
from weight_sync.picks import BoxMatrix, parts_of_box
from weight_sync.rank_cover import RankCover
from weight_sync.spans import (
    CAST_DTYPES,
    DTYPE_CODES,
    INT8_BLOCKS_CODE,
    MOVE_COLUMNS,
    TENSOR_COLUMNS,
    SpanTensor,
    table_of,
)
from weight_sync.take_pairs import PairsFound, is_compiled, kinds_of
from weight_sync.take_spans import Found, SpanTables
from weight_sync.tensor_meta import BucketLayout, LogicalWeights, PackedBucket, Piece, TensorMeta

_MANIFESTS_KEPT = 2
"""Plans of manifests are kept for this many times the tensors of the model, all together."""


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """T whole logical tensors of a layout, P boxes of others, Q quantised weights, and M moves of the first two.

    `numbers`, `names` and `wire_names` [T + Q]: of whole tensors, then of weights; the last are the names of what came.
    `codes` [T + P]: dtypes as sent, of `DTYPE_CODES`.  `boxes`, `pairs`: None where there are none.  `tables`: of
    tensors, then boxes, and moves.  `storages`: a tensor of each storage that moves go to.  `rest`: places in the
    layout of the wire tensors that are not planned.
    """

    numbers: Numbers
    names: Sequence[str]
    wire_names: Sequence[str]
    codes: np.ndarray
    boxes: PlannedBoxes | None
    pairs: PlannedPairs | None
    tables: SpanTables
    storages: Sequence[torch.Tensor]
    rest: Sequence[int]

    @property
    def num_plain(self) -> int:
        """The number of whole logical tensors without the quantised weights."""
        return len(self.numbers) - (0 if self.pairs is None else len(self.pairs.numbers))

    def take(
        self,
        source: torch.Tensor,
        storages: Sequence[torch.Tensor],
        checks: bool = True,
        writes: bool = True,
        live: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Found, PairsFound | None]:
        """Take a bucket by all tables.  Raises as `SpanTables.take` and `PairTables.take`."""
        found = self.tables.take(source, storages, checks=checks, writes=writes, live=live)
        return found, None if self.pairs is None else self.pairs.tables.take(source, storages, checks, writes, live)

    @functools.cached_property
    def keys(self) -> list[int]:
        """The addresses of the storages, which stay as long as the plan does."""
        return [address_of(storage) for storage in self.storages]

    @functools.cached_property
    def came_as(self) -> frozenset[str]:
        """The names under which whole tensors and weights come."""
        return frozenset(self.wire_names)

    @property
    def all_names(self) -> Sequence[str]:
        """The names of all tensors, also of the ones that come in boxes."""
        return self.names if self.boxes is None else [*self.names, *self.boxes.names]


def plan_bucket(
    layout: BucketLayout, wires: Wires, homes: Homes, table: TensorTable, quantised: HeldFormats
) -> BucketPlan:
    """Return the plan of a layout of the tensors `wires`.

    Whether the boxes of a tensor are planned does not depend on the boxes: all of them go the same way.  Raises
    `CoverageError` for a tensor that comes whole, in one box or in parts, while another box brings some of it.
    """
    rows, rest, seen = _Rows(table, quantised, homes), [], set[str]()
    parts = wires.parts
    in_parts = {parts[wire].name for wire in layout.metas if wire in parts} if parts else set[str]()
    gathered = wires.gathered(layout) if parts and is_compiled(homes.device) else {}
    planned = set[int]()
    for place, (wire, offset) in enumerate(zip(layout.metas, layout.offsets, strict=True)):
        if place in planned:
            continue
        part = parts.get(wire) if parts else None
        pieces = wires.pieces[wire] if part is None else wires.weights.get(part.name, ())
        names = [piece.name for piece in pieces]
        is_new = wire.box is not None or seen.isdisjoint(names)
        if part is not None:
            own = gathered.pop(part.name, None)
            is_planned = own is not None and is_new and rows.add_pair(part, own, pieces)
            if own is not None and is_planned:
                planned.update(at.place for at in own.values())
        else:
            is_planned = wire.name not in in_parts and is_new and rows.add(wire, place, offset, pieces)
        if not is_planned:
            rest.append(place)
        seen.update(names)
    rows.require_apart()
    return rows.plan(rest)


@dataclass
class _Rows:
    """The rows of a plan's tables, as they are made."""

    table: TensorTable
    quantised: HeldFormats
    homes: Homes
    whole: list[_Row] = field(default_factory=list)
    boxes: list[_Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pairs = PairRows(self.table, self.quantised, kinds_of(self.homes.device))

    def add(self, wire: TensorMeta, place: int, offset: int, pieces: Sequence[Piece]) -> bool:
        """Add the logical tensors of a wire tensor that begins at byte `offset`.  False: tables cannot express them."""
        of = self.quantised
        formats = [of[piece.name] for piece in pieces if piece.name in of] if of else []
        if formats and not all(held.is_int8_blocks for held in formats):
            return wire.box is None and self._add_quantised(wire, place, offset, pieces)
        if wire.box is not None and formats:
            return False
        found, sent = [], DTYPE_CODES[wire.dtype]
        for piece in pieces:
            held = self._held(piece.name)
            to = self.homes.moves(held)
            matrices = None if to is None else _matrices(wire, offset, piece, held, to[1])
            code = sent if wire.dtype == held.dtype and not formats else self._code_of(wire, held)
            if to is None or matrices is None or code is None:
                return False
            for box, first, numbers in matrices:
                start = offset + first * wire.dtype.itemsize
                found.append(_Row(held, wire, box, SpanTensor(start, sent, code, *numbers), to[0]))
        for row in found:
            span = row.span
            is_whole = span.num_rows == span.rows and span.num_columns == span.columns
            (self.whole if is_whole else self.boxes).append(row)
        return True

    def add_pair(self, part: WirePart, gathered: Gathered, pieces: Sequence[Piece]) -> bool:
        """Add a weight that came in parts.  False: tables cannot express it."""
        if len(pieces) != 1 or (moves := self.homes.moves(self._held(pieces[0].name))) is None:
            return False
        return self.pairs.add_parts(part, gathered, pieces[0], moves[0])

    def _add_quantised(self, wire: TensorMeta, place: int, offset: int, pieces: Sequence[Piece]) -> bool:
        """Add the logical tensors of a wire tensor that are quantised here, if each lies there row by row."""
        found, moves = list[tuple[TensorMeta, int]](), list[Sequence[Move]]()
        for piece in pieces if is_compiled(self.homes.device) else ():
            held = self._held(piece.name)
            to = self.homes.moves(held)
            matrices = None if to is None else _matrices(wire, offset, piece, held, to[1])
            if to is None or matrices is None or len(matrices) != 1:
                return False
            _, first, (rows, columns, *rest) = matrices[0]
            if rest != [columns, 1, 0, rows, 0, columns]:
                return False
            found.append((held, offset + first * wire.dtype.itemsize))
            moves.append(to[0])
        return bool(found) and self.pairs.add_values(wire, place, found, moves)

    def _held(self, name: str) -> TensorMeta:
        return self.table.metas[self.table.number_of[name]]

    def require_apart(self) -> None:
        """Raise `CoverageError` for a tensor that is whole in one row, of any table, and has another one."""
        others = {row.held.name: row for row in self.boxes}
        is_each_once = len({row.held.name for row in self.whole}) == len(self.whole)
        for row in self.whole if others or self.pairs.rows or not is_each_once else ():
            other = others.setdefault(row.held.name, row)
            if other is not row:
                raise CoverageError(f"{row.held.name}: the boxes {box_text(other.box)} and {box_text(row.box)} overlap")
        for pair in self.pairs.rows:
            if pair.held.name in others:
                raise CoverageError(f"{pair.held.name} came whole, as {pair.wire_name}, while boxes of it come")

    def plan(self, rest: Sequence[int]) -> BucketPlan:
        """Return the plan of all that was added.  `rest`: places in the layout that were not."""
        storages: dict[int, torch.Tensor] = {}
        numbers: dict[int, int] = {}
        known: dict[int, int] = {}  # by the identity of tensors, which the rows hold

        def number_of(storage: torch.Tensor) -> int:
            number = known.get(id(storage))
            if number is None:
                key = address_of(storage)
                storages.setdefault(key, storage)
                number = known[id(storage)] = numbers.setdefault(key, len(numbers))
            return number

        every = [*self.whole, *self.boxes]
        moves = [
            (at, kind, number_of(storage), *more) for at, row in enumerate(every) for kind, storage, *more in row.moves
        ]
        tensors = table_of([row.span for row in every], TENSOR_COLUMNS)
        pairs = self.pairs.planned(number_of)
        return BucketPlan(
            numbers=np.concatenate([self._numbers(self.whole), *([] if pairs is None else [pairs.numbers])]),
            names=[*(row.held.name for row in self.whole), *(() if pairs is None else pairs.names)],
            wire_names=[*(row.wire.name for row in self.whole), *(() if pairs is None else pairs.wire_names)],
            codes=tensors[:, 1].numpy().astype(np.uint8),
            boxes=self._boxes() if self.boxes else None,
            pairs=pairs,
            tables=SpanTables(tensors, table_of(moves, MOVE_COLUMNS)),
            storages=list(storages.values()),
            rest=rest,
        )

    def _boxes(self) -> PlannedBoxes:
        return PlannedBoxes(
            numbers=self._numbers(self.boxes),
            names=[row.held.name for row in self.boxes],
            wire_names=[row.wire.name for row in self.boxes],
            boxes=[row.box for row in self.boxes],
            shapes=[row.held.shape for row in self.boxes],
            edges=np.array([row.edges for row in self.boxes], dtype=np.int64),
            numels=np.array([row.held.numel for row in self.boxes], dtype=np.int64),
            forms=np.array([hash((row.wire.name, row.span.sent)) for row in self.boxes], dtype=np.int64),
        )

    def _numbers(self, rows: Sequence[_Row]) -> Numbers:
        return np.array([self.table.number_of[row.held.name] for row in rows], dtype=np.int64)

    def _code_of(self, wire: TensorMeta, held: TensorMeta) -> int | None:
        """Return the code of a tensor's dtype as it is held; None where `take_spans` cannot convert to it."""
        is_cast = wire.dtype in CAST_DTYPES and held.dtype in CAST_DTYPES
        held_format = self.quantised.get(held.name)
        if held_format is None:
            return DTYPE_CODES[held.dtype] if is_cast or wire.dtype == held.dtype else None
        return INT8_BLOCKS_CODE if is_cast else None


class _Row(NamedTuple):
    """A row of the table of tensors: `box` of the logical tensor `held`, and the moves of all of that."""

    held: TensorMeta
    wire: TensorMeta
    box: Box
    span: SpanTensor
    moves: Sequence[Move]

    @property
    def edges(self) -> tuple[int, int, int, int]:
        """The edges of its box of the matrix, as `PlannedBoxes` has them."""
        top, rows, left, columns = self.span[-4:]
        return top, top + rows, left, left + columns


def _matrices(wire: TensorMeta, offset: int, piece: Piece, held: TensorMeta, lead: int) -> Sequence[BoxMatrix] | None:
    """Return what of a piece lies in a wire tensor that begins at byte `offset`: boxes of its matrix.

    None if its dtype cannot be read from there, or the wire tensor is empty.
    """
    return None if offset % wire.dtype.itemsize else parts_of_box(wire, piece, held.shape, lead)


# --- plans that are kept ------------------------------------------------------------------------------------------


class Planner:
    """Makes plans, and keeps them as long as their layouts are kept and the places stay.

    `quantised`: see `Intake`.
    """

    def __init__(self, table: TensorTable, quantised: HeldFormats) -> None:
        self.table = table
        self._quantised = quantised
        self._manifests: KnownCalls[ManifestPlan] = KnownCalls(_MANIFESTS_KEPT * len(table))
        self._homes: tuple[Hashable, Homes] | None = None
        self._split: weakref.WeakKeyDictionary[BucketLayout, SplitWeights] = weakref.WeakKeyDictionary()
        self._plans: weakref.WeakKeyDictionary[BucketLayout, dict[Hashable, BucketPlan]] = weakref.WeakKeyDictionary()

    def manifest(self, weights: LogicalWeights, manifest: Manifest, cast: bool) -> ManifestPlan:
        """Return the plan of a manifest.  Raises as `plan_manifest`."""
        if manifest.key is None:
            return plan_manifest(weights, self.table, manifest, cast)
        return self._manifests.get((manifest.key, cast), lambda: plan_manifest(weights, self.table, manifest, cast))

    def homes(self, weights: LogicalWeights) -> Homes:
        """Return where tensors live now; plans for places that were left are forgotten."""
        key = weights.places_key()
        if self._homes is None or self._homes[0] != key:
            self._homes = key, Homes(weights)
            self._plans.clear()
        return self._homes[1]

    def joined(self, weights: LogicalWeights, bucket: PackedBucket, pairs: PairedTensors) -> PackedBucket:
        """Return a bucket with the parts that wait of its weights, where tables take them; or as it is."""
        if not pairs.is_waiting or not is_compiled(self.homes(weights).device):
            return bucket
        split = self._split.get(bucket.layout)
        if split is None:
            split = self._split[bucket.layout] = SplitWeights(weights, bucket.layout)
        return split.join(bucket, pairs)

    def plans(
        self, weights: LogicalWeights, layouts: Sequence[BucketLayout], cast: bool, cover: RankCover | None = None
    ) -> list[BucketPlan]:
        """Return the plan of each layout of a call.  `cover`: of an update per rank.

        Raises as `Wires.of`, of all tensors of the call together, and as `RankCover.kept_boxes`.
        """
        homes, key = self.homes(weights), (cast, cover)
        known = [self._plans.get(layout, {}).get(key) for layout in layouts]
        if all(plan is not None for plan in known):
            return [plan for plan in known if plan is not None]
        with without_collections():
            made = self._made(weights, layouts, homes, cast)
        if cover is not None:
            made = [plan if plan.boxes is None else replace(plan, boxes=cover.kept_boxes(plan.boxes)) for plan in made]
        for layout, plan in zip(layouts, made, strict=True):
            self._plans.setdefault(layout, {})[key] = plan
        return made

    def _made(
        self, weights: LogicalWeights, layouts: Sequence[BucketLayout], homes: Homes, cast: bool
    ) -> list[BucketPlan]:
        wires = Wires.of(weights, [meta for layout in layouts for meta in layout.metas], cast)
        return [plan_bucket(layout, wires, homes, self.table, self._quantised) for layout in layouts]

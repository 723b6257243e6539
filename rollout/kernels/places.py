"""`Place`s: where one logical tensor lives in a storage of either layout, to be written and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weight_sync.homes import address_of
from weight_sync.moves import Move, MoveKind, lead_of, matrix_of, packed_move, two_strides
from weight_sync.tensor_meta import Pair, Place, Region

__all__ = [
    "AbsorbedPlace",
    "InnerPlace",
    "LatentSizes",
    "PackedPlace",
    "PackedRows",
    "Place",
    "PlaceBase",
    "ReorderedPlace",
    "ShardPlace",
    "ViewPlace",
]

_MAX_RUNS = 64
"""Rows in another order are moved run by run, if there are no more of them."""


class PlaceBase:
    """The base of places: they hold whole tensors, and what `read` gives is all that is held."""

    region: Region | None = None

    @property
    def storage(self) -> torch.Tensor:
        raise NotImplementedError

    @property
    def address(self) -> int:
        return address_of(self.storage)

    def write(self, source: torch.Tensor | Pair) -> None:
        raise NotImplementedError

    def read(self) -> torch.Tensor:
        raise NotImplementedError

    def saved(self) -> torch.Tensor | Pair:
        return self.read()

    def restore(self, content: torch.Tensor | Pair) -> None:
        self.write(content)


class InnerPlace(PlaceBase):
    """The base of places that lie where `_inner` does."""

    _inner: Place

    @property
    def storage(self) -> torch.Tensor:
        return self._inner.storage

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes

    def read(self) -> torch.Tensor:
        return self._inner.read()

    def saved(self) -> torch.Tensor | Pair:
        return self._inner.saved()

    def restore(self, content: torch.Tensor | Pair) -> None:
        self._inner.restore(content)


class ViewPlace(PlaceBase):
    """A part of a tensor that is stored as it is."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    @property
    def storage(self) -> torch.Tensor:
        return self._view

    @property
    def num_bytes(self) -> int:
        return self._view.nbytes

    def rebind(self, storage: torch.Tensor) -> ViewPlace:
        return ViewPlace(storage)

    def write(self, source: torch.Tensor | Pair) -> None:
        assert isinstance(source, torch.Tensor), "pairs are not held here"
        self._view.copy_(source)

    def read(self) -> torch.Tensor:
        return self._view

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        assert self._view.shape == torch.Size(shape), shape
        lead = lead_of(None) if lead is None else lead
        strides = two_strides(shape, self._view.stride(), lead)
        if strides is None:
            return None
        rows, columns = matrix_of(shape, lead)
        offset = int(self._view.storage_offset()) * self._view.itemsize
        return [Move(MoveKind.BOX, self._view, offset, 0, rows, 0, columns, *strides)]


class PackedRows(PlaceBase):
    """Rows `rows` (step 1) of packed matrices [len(rows), in_features], in any format.

    `step` and `offset` describe how blocks of sixteen rows alternate with blocks of another matrix.
    """

    def __init__(self, packed: torch.Tensor, rows: range, in_features: int, step: int = 1, offset: int = 0) -> None:
        self._packed = packed
        self._rows = rows
        self._in_features = in_features
        self._layout = (step, offset)

    @property
    def storage(self) -> torch.Tensor:
        return self._packed


class PackedPlace(PackedRows):
    """Rows of a matrix packed for the compiled operators (`kernels/csrc/packed.h`, `pack.cpp`)."""

    @property
    def num_bytes(self) -> int:
        return len(self._rows) * self._in_features * self._packed.itemsize

    def rebind(self, storage: torch.Tensor) -> PackedPlace:
        return PackedPlace(storage, self._rows, self._in_features, *self._layout)

    def write(self, source: torch.Tensor | Pair) -> None:
        assert isinstance(source, torch.Tensor), "pairs are not held here"
        assert source.shape == (len(self._rows), self._in_features), source.shape
        source = source.to(device=self._packed.device, dtype=self._packed.dtype)
        torch.ops.lockstep.pack_rows(self._packed, source, self._rows.start, *self._layout)

    def read(self) -> torch.Tensor:
        unpack: Callable[..., torch.Tensor] = torch.ops.lockstep.unpack_rows
        return unpack(self._packed, self._in_features, self._rows.start, len(self._rows), *self._layout)

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        rows, columns = len(self._rows), self._in_features
        assert tuple(shape) == (rows, columns) and lead in (None, 1), shape
        return [packed_move(MoveKind.PACKED, self._packed, rows, columns, self._rows.start, *self._layout)]


@dataclass(frozen=True)
class LatentSizes:
    """The elements that a head makes of a latent of `rank` elements: `nope` of its keys, `value` of its values."""

    nope: int
    value: int
    rank: int

    @property
    def key_matrix(self) -> tuple[int, int]:
        """Rows and columns of the matrix that is applied to queries: the matrix for keys, transposed."""
        return self.rank, self.nope

    @property
    def value_matrix(self) -> tuple[int, int]:
        return self.value, self.rank


class AbsorbedPlace(PlaceBase):
    """The matrix that makes keys and values of latents [H (nope + v), R], as the compiled operators apply it.

    Each head has its packed part for keys, transposed as it is applied to queries, then its part for values.  No other
    matrix is computed from it, so a refresh of this matrix refreshes the matrix in use.
    """

    def __init__(self, packed_HN: torch.Tensor, sizes: LatentSizes) -> None:
        self._packed_HN = packed_HN
        self._sizes = sizes

    @property
    def storage(self) -> torch.Tensor:
        return self._packed_HN

    @property
    def num_bytes(self) -> int:
        sizes = self._sizes
        return self._packed_HN.shape[0] * (sizes.nope + sizes.value) * sizes.rank * self._packed_HN.itemsize

    def rebind(self, storage: torch.Tensor) -> AbsorbedPlace:
        return AbsorbedPlace(storage, self._sizes)

    def write(self, source: torch.Tensor | Pair) -> None:
        assert isinstance(source, torch.Tensor), "pairs are not held here"
        source = source.to(device=self._packed_HN.device, dtype=self._packed_HN.dtype)
        for rows, (keys, values) in zip(source.chunk(self._packed_HN.shape[0]), self._halves(), strict=True):
            key_rows, value_rows = rows.split((self._sizes.nope, self._sizes.value))
            torch.ops.lockstep.pack_rows(keys, key_rows.t(), 0, 1, 0)
            torch.ops.lockstep.pack_rows(values, value_rows, 0, 1, 0)

    def read(self) -> torch.Tensor:
        found, sizes = [], self._sizes
        for keys, values in self._halves():
            found.append(torch.ops.lockstep.unpack_rows(keys, sizes.nope, 0, sizes.rank, 1, 0).t())
            found.append(torch.ops.lockstep.unpack_rows(values, sizes.rank, 0, sizes.value, 1, 0))
        return torch.cat(found)

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        sizes, found, row = self._sizes, [], 0
        for keys, values in self._halves():
            of_keys = packed_move(MoveKind.PACKED_TRANSPOSED, keys, sizes.nope, sizes.rank)
            of_values = packed_move(MoveKind.PACKED, values, sizes.value, sizes.rank)
            found += [of_keys.shifted(row, 0), of_values.shifted(row + sizes.nope, 0)]
            row += sizes.nope + sizes.value
        assert tuple(shape) == (row, sizes.rank) and lead in (None, 1), shape
        return found

    def _halves(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the packed parts for keys and for values of each head."""
        dtype = self._packed_HN.dtype
        keys = torch.ops.lockstep.empty_packed([0], *self._sizes.key_matrix, dtype).shape[1:].numel()
        for row in self._packed_HN:
            yield row[:keys], row[keys:]


class ReorderedPlace(InnerPlace):
    """Rows in another order than the logical one: row i of the `inner` place is row `order[i]` of the content."""

    def __init__(self, inner: Place, order: torch.Tensor) -> None:
        self._inner = inner
        self._order = order

    def rebind(self, storage: torch.Tensor) -> ReorderedPlace:
        return ReorderedPlace(self._inner.rebind(storage), self._order)

    def write(self, source: torch.Tensor | Pair) -> None:
        self._inner.write(_with_rows(source, self._order))

    def read(self) -> torch.Tensor:
        content = self._inner.read()
        return content.index_select(0, self._order.argsort().to(content.device))

    def saved(self) -> torch.Tensor | Pair:
        return _with_rows(self._inner.saved(), self._order.argsort())

    def restore(self, content: torch.Tensor | Pair) -> None:
        self._inner.restore(_with_rows(content, self._order))

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        runs, inner = _runs_of(self._order), self._inner.moves(shape, lead)
        if inner is None or len(runs) > _MAX_RUNS or lead not in (None, 1):
            return None
        columns = range(matrix_of(shape)[1])
        found = []
        for move in inner:
            for first, rows in runs:
                part = move.cut(range(first, first + len(rows)), columns)
                if part is None:
                    return None
                found.append(part.shifted(rows.start - first, 0))
        return [move for move in found if move.num_elements > 0]


class ShardPlace(InnerPlace):
    """The part of a logical tensor that this rank holds, in an `inner` place for just this part.

    It is `length` indices of dimension `dim`, from `start` on; see `Region`.
    """

    def __init__(self, inner: Place, dim: int, start: int, length: int, sections: tuple[int, ...] = ()) -> None:
        self._inner = inner
        self.region: Region = Region(dim, start, length, sections)

    def rebind(self, storage: torch.Tensor) -> ShardPlace:
        region = self.region
        return ShardPlace(self._inner.rebind(storage), region.dim, region.start, region.length, region.sections)

    def write(self, source: torch.Tensor | Pair) -> None:
        self._inner.write(source.of(self.region) if isinstance(source, Pair) else self.region.of(source))

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        region = self.region
        lead = lead_of(region.dim) if lead is None else lead
        if region.dim not in (0, lead):
            return None  # its indices are no box
        in_rows = region.dim == 0
        part = [*shape[: region.dim], region.length, *shape[region.dim + 1 :]]
        inner = self._inner.moves(part, lead)
        if inner is None:
            return None
        rows, columns = matrix_of(part, lead)
        width = (rows if in_rows else columns) // max(region.length, 1)  # of one index of the dimension
        found = []
        for move in inner:
            for run in region.runs():
                here, there = (index[region.dim] for index in run)
                span, by = range(here.start * width, here.stop * width), (there.start - here.start) * width
                cut = move.cut(span, range(columns)) if in_rows else move.cut(range(rows), span)
                if cut is None:
                    return None
                found.append(cut.shifted(by, 0) if in_rows else cut.shifted(0, by))
        return [move for move in found if move.num_elements > 0]


def _with_rows(content: torch.Tensor | Pair, order: torch.Tensor) -> torch.Tensor | Pair:
    """Return content whose row i is row `order[i]`."""
    if not isinstance(content, Pair):
        return content.index_select(0, order.to(content.device))
    assert content.block[0] == 1, "no two rows share a scale"
    weight, scale = (half.index_select(0, order.to(half.device)) for half in (content.weight, content.scale))
    return Pair(weight, scale, content.block)


def _runs_of(order: torch.Tensor) -> list[tuple[int, range]]:
    """Return the runs of an order: the first place of each, and the rows that come there one after the other."""
    if order.numel() == 0:
        return []
    breaks = (order.diff() != 1).nonzero().view(-1) + 1
    firsts = [0, *breaks.tolist()]
    ends = [*firsts[1:], order.numel()]
    starts = order[firsts].tolist()
    return [(first, range(start, start + end - first)) for first, end, start in zip(firsts, ends, starts, strict=True)]

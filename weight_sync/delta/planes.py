"""The written form of `Changes`: five planes of bytes, each of one kind, so that each compresses by itself.

    gaps        distance to the next changed element, a byte each; 255 means: 255 further, and read on
    directions  one bit a change: away from zero (0) or towards it (1)
    strides     which changes are larger than one step: gaps again, counted in changes
    magnitudes  of these, the size of the step less two, a byte each; 255 means: it is in `wide`
    wide        step sizes that do not fit, or all differences of a dense tensor, as words, first bytes first

A tensor of which so much changed that this is no shorter than its bytes is written densely: the difference of every
word.  Turning the direction bits around, or negating dense differences, gives the way back.

All functions are vectorised, and read many tensors at once.

T tensors, N changed elements, G bytes of gaps, S changes larger than one step, W words in the wide plane.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weight_sync.delta.changes import Changes
from weight_sync.errors import ContentError

PLANES = ("gaps", "directions", "strides", "magnitudes", "wide")
_ESCAPE = 255
_LEAST_WIDE = _ESCAPE + 2  # the smallest step size that the wide plane holds
_SIZE_BYTES = 6
SIZES_BYTES = 1 + _SIZE_BYTES * (1 + len(PLANES))
"""The bytes of a tensor's sizes."""


@dataclass(frozen=True, eq=False)
class SizeTable:
    """The bytes of each plane that belong to each of T tensors, `counts` int64 [T, 5], and how they are to be read:
    `num_changes` int64 [T], `is_dense` bool [T].
    """

    num_changes: np.ndarray
    is_dense: np.ndarray
    counts: np.ndarray

    @classmethod
    def join(cls, tables: Sequence[SizeTable]) -> SizeTable:
        """Return the tables below one another; at least one."""
        columns = zip(*((each.num_changes, each.is_dense, each.counts) for each in tables), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.num_changes)

    def some(self, which: slice | np.ndarray) -> SizeTable:
        """Return the rows of some tensors."""
        return SizeTable(self.num_changes[which], self.is_dense[which], self.counts[which])

    def first_misfit(self, numels_T: np.ndarray, itemsizes_T: np.ndarray) -> int | None:
        """Return the first tensor that is too small for its sizes.  All numbers are below 2^48."""
        changes_T, (gaps, directions, strides, magnitudes, wide) = self.num_changes, self.counts.T
        sparse_T = (
            ~self.is_dense
            & (changes_T <= gaps)
            & (gaps <= changes_T + numels_T // _ESCAPE)
            & (directions == -(-changes_T // 8))
            & (magnitudes <= strides)
            & (strides <= magnitudes + changes_T // _ESCAPE)
            & (magnitudes <= changes_T)
            & (wide % itemsizes_T == 0)
            & (wide <= magnitudes * itemsizes_T)
            & (self.counts.sum(1) <= numels_T * itemsizes_T)  # else it is written densely
        )
        dense_T = self.is_dense & (wide == numels_T * itemsizes_T) & ~self.counts[:, :-1].any(1)
        is_right_T = (changes_T >= 0) & (changes_T <= numels_T) & (self.counts >= 0).all(1) & (sparse_T | dense_T)
        wrong = np.flatnonzero(~is_right_T)
        return int(wrong[0]) if wrong.size else None

    def check(self, names: Sequence[str], numels_T: np.ndarray, itemsizes_T: np.ndarray) -> None:
        """Check sizes that came from outside.  Raises `ContentError`; see `first_misfit`."""
        at = self.first_misfit(numels_T, itemsizes_T)
        if at is not None:
            raise ContentError(
                f"{names[at]}: a delta of {self.num_changes[at]} changes in {numels_T[at]} elements cannot have planes "
                f"of {self.counts[at].tolist()} entries"
            )


def write_sizes(sizes: SizeTable) -> bytes:
    """Return `SIZES_BYTES` for each tensor: whether it is dense, then changes and counts, byte by byte."""
    numbers = np.concatenate([sizes.num_changes, sizes.counts.T.reshape(-1)]).view(np.uint64)
    return sizes.is_dense.astype(np.uint8).tobytes() + _write_words(numbers, _SIZE_BYTES).tobytes()


def read_sizes(written: bytes, count: int) -> SizeTable:
    """Read what `write_sizes` wrote of `count` tensors; the table is yet to be checked.  Raises `ContentError`."""
    is_dense = np.frombuffer(written, dtype=np.uint8, count=count)
    if (is_dense > 1).any():
        raise ContentError("the sizes of a delta frame are malformed")
    num_numbers = (1 + len(PLANES)) * count
    words = _read_words(np.frombuffer(written, dtype=np.uint8, offset=count), np.array([num_numbers]), _SIZE_BYTES)
    num_changes, *counts = words.view(np.int64).reshape(-1, count) if count else np.zeros((6, 0), dtype=np.int64)
    return SizeTable(num_changes, is_dense.astype(np.bool_), np.stack(counts, axis=1))


def write_all_planes(
    changes: Changes, counts_T: np.ndarray, numels_T: np.ndarray, itemsize: int
) -> tuple[SizeTable, list[np.ndarray]]:
    """Return the planes of T tensors of `numels_T` elements, each plane of one tensor after the other.

    `changes`: of all tensors, end to end, `counts_T` of each; positions are counted in each tensor.
    """
    sizes, planes = _write_sparse(changes, counts_T, itemsize)
    dense_T = (sizes.counts.sum(1) >= numels_T * itemsize) & (numels_T > 0)
    if not dense_T.any():
        return sizes, planes
    is_sparse_N = np.repeat(~dense_T, counts_T)
    rest = Changes(changes.positions_N[is_sparse_N], changes.steps_N[is_sparse_N])
    sizes, (*planes, sparse_wide) = _write_sparse(rest, np.where(dense_T, 0, counts_T), itemsize)
    sizes.counts[dense_T, -1] = numels_T[dense_T] * itemsize
    wide_T, first_N = sizes.counts[:, -1], _starts(counts_T)
    wide = np.empty(int(wide_T.sum()), dtype=np.uint8)
    wide[np.repeat(~dense_T, wide_T)] = sparse_wide
    for at in np.flatnonzero(dense_T).tolist():
        some, start = slice(first_N[at], first_N[at] + counts_T[at]), int(_starts(wide_T)[at])
        differences = np.zeros(int(numels_T[at]), dtype=np.int64)
        differences[changes.positions_N[some]] = changes.steps_N[some]
        wide[start : start + int(wide_T[at])] = _write_words(differences.view(np.uint64), itemsize)
    return SizeTable(counts_T, dense_T, sizes.counts), [*planes, wide]


def _write_sparse(changes: Changes, counts_T: np.ndarray, itemsize: int) -> tuple[SizeTable, list[np.ndarray]]:
    steps_N, starts_T = changes.steps_N, _starts(counts_T)
    sizes_N = np.where(steps_N < 0, -steps_N, steps_N).view(np.uint64)  # the lowest int64 is right as a uint64
    larger_S = np.flatnonzero(sizes_N > 1)
    larger_T = _sums(sizes_N > 1, counts_T)
    beyond_S = sizes_N[larger_S]
    magnitudes_S = np.minimum(beyond_S - np.uint64(2), _ESCAPE).astype(np.uint8)
    is_wide_S = magnitudes_S == _ESCAPE
    wide_T = _sums(is_wide_S, larger_T)
    gaps, gaps_T = _write_gaps(changes.positions_N, counts_T)
    strides, strides_T = _write_gaps(larger_S - np.repeat(starts_T, larger_T), larger_T)
    directions_T = -(-counts_T // 8)
    bits = np.zeros(8 * int(directions_T.sum()), dtype=np.uint8)
    bits[np.repeat(8 * _starts(directions_T), counts_T) + _within(counts_T)] = steps_N < 0
    wide = _write_all_words(beyond_S[is_wide_S], wide_T, itemsize)
    counts = np.stack([gaps_T, directions_T, strides_T, larger_T, itemsize * wide_T], axis=1)
    table = SizeTable(counts_T, np.zeros(len(counts_T), dtype=np.bool_), counts)
    return table, [gaps, np.packbits(bits, bitorder="little"), strides, magnitudes_S, wide]


def read_all_planes(sizes: SizeTable, planes: Sequence[np.ndarray], numels_T: np.ndarray, itemsize: int) -> Changes:
    """Read the planes of T tensors of `numels_T` elements, each plane of one tensor after the other.

    Returns the changes end to end; positions are counted in each tensor.  Raises `ContentError` for planes that
    contradict each other or leave a tensor.
    """
    is_first_T = np.ones(len(sizes), dtype=np.bool_)  # of a run that is read in one go
    is_first_T[1:] = sizes.is_dense[1:] | sizes.is_dense[:-1]
    edges = [*np.flatnonzero(is_first_T).tolist(), len(sizes)]
    found, starts = [], [0] * len(PLANES)
    for first, last in itertools.pairwise(edges):
        run = sizes.some(slice(first, last))
        stops = [start + count for start, count in zip(starts, run.counts.sum(0).tolist(), strict=True)]
        parts = [plane[start:stop] for plane, start, stop in zip(planes, starts, stops, strict=True)]
        if run.is_dense[0]:
            found.append(_read_dense(parts[-1], int(run.num_changes[0]), itemsize))
        else:
            found.append(_read_sparse(parts, run, numels_T[first:last], itemsize))
        starts = stops
    return found[0] if len(found) == 1 else _joined(found)


def _joined(found: Sequence[Changes]) -> Changes:
    nothing = np.empty(0, dtype=np.int64)
    positions = np.concatenate([nothing, *(changes.positions_N for changes in found)])
    return Changes(positions, np.concatenate([nothing, *(changes.steps_N for changes in found)]))


def _read_dense(wide: np.ndarray, num_changes: int, itemsize: int) -> Changes:
    differences = _sign_extend(_read_words(wide, np.array([wide.size // itemsize]), itemsize), itemsize)
    positions_N = np.flatnonzero(differences)
    if positions_N.size != num_changes:
        raise ContentError(f"received {positions_N.size} changes, expected {num_changes}")
    return Changes(positions_N, differences[positions_N])


def _read_sparse(planes: Sequence[np.ndarray], sizes: SizeTable, numels_T: np.ndarray, itemsize: int) -> Changes:
    gaps_G, directions, strides, magnitudes_S, wide = planes
    num_T, (gaps_T, directions_T, strides_T, larger_T, wide_T) = sizes.num_changes, sizes.counts.T
    positions_N = _read_gaps(gaps_G, gaps_T, num_T, numels_T)
    larger_S = _read_gaps(strides, strides_T, larger_T, num_T) + np.repeat(_starts(num_T), larger_T)
    wide_W = _read_words(wide, wide_T // itemsize, itemsize)
    beyond_S = magnitudes_S.astype(np.uint64) + np.uint64(2)
    is_wide_S = magnitudes_S == _ESCAPE
    if (_sums(is_wide_S, larger_T) != wide_T // itemsize).any() or (wide_W < _LEAST_WIDE).any():
        raise ContentError("the step sizes of a delta contradict each other")
    if (wide_W > np.uint64(1 << (8 * itemsize - 1))).any():
        raise ContentError(f"a step is too large for words of {itemsize} bytes")
    beyond_S[is_wide_S] = wide_W
    steps_N = np.ones(positions_N.size, dtype=np.uint64)
    steps_N[larger_S] = beyond_S
    bits = np.unpackbits(directions, bitorder="little")
    bits_N = bits[np.repeat(8 * _starts(directions_T), num_T) + _within(num_T)]
    if np.count_nonzero(bits) != np.count_nonzero(bits_N):
        raise ContentError("a delta has more directions than changes")
    steps_N = np.where(bits_N.astype(bool), np.uint64(0) - steps_N, steps_N)
    return Changes(positions_N, steps_N.view(np.int64))


def invert_planes(sizes: SizeTable, planes: Sequence[np.ndarray], itemsize: int) -> list[np.ndarray]:
    """Return the planes of the way back of one tensor, of the same sizes."""
    gaps_G, directions, strides, magnitudes_S, wide = planes
    if sizes.is_dense[0]:
        differences = np.uint64(0) - _read_words(wide, np.array([wide.size // itemsize]), itemsize)
        return [gaps_G, directions, strides, magnitudes_S, _write_words(differences, itemsize)]
    bits = np.unpackbits(directions, bitorder="little")[: sizes.num_changes[0]] ^ 1
    return [gaps_G, np.packbits(bits, bitorder="little"), strides, magnitudes_S, wide]


def _write_gaps(positions_N: np.ndarray, counts_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances between ascending positions of T tensors, less one, counted from just before 0.

    uint8 [G], and how many are of each tensor.
    """
    before_N = np.full(positions_N.size, -1, dtype=np.int64)
    before_N[1:] = positions_N[:-1]
    before_N[_starts(counts_T)[counts_T > 0]] = -1
    gaps_N = positions_N - before_N - 1
    lengths_N = gaps_N // _ESCAPE + 1
    last_N = np.cumsum(lengths_N) - 1
    written = np.full(int(last_N[-1]) + 1 if last_N.size else 0, _ESCAPE, dtype=np.uint8)
    written[last_N] = gaps_N % _ESCAPE
    return written, _sums(lengths_N, counts_T)


def _read_gaps(gaps_G: np.ndarray, lengths_T: np.ndarray, counts_T: np.ndarray, limits_T: np.ndarray) -> np.ndarray:
    """Read positions of T tensors: the inverse of `_write_gaps` for each.

    `lengths_T`: how many of the gaps are a tensor's, `counts_T`: how many positions they are.  Returns int64
    [sum of `counts_T`], of each tensor ascending and below its limit.
    """
    is_last_G = gaps_G != _ESCAPE
    ends_T = np.cumsum(lengths_T)
    if (_sums(is_last_G, lengths_T) != counts_T).any() or not is_last_G[ends_T[lengths_T > 0] - 1].all():
        raise ContentError("the positions of a delta are cut off")
    reached_G = np.cumsum(gaps_G + is_last_G.astype(np.int64), dtype=np.int64)
    before_T = np.concatenate([[0], reached_G])[ends_T - lengths_T]
    positions: np.ndarray = reached_G[is_last_G] - 1 - np.repeat(before_T, counts_T)
    has_any_T = counts_T > 0
    last_T, limits_T = positions[np.cumsum(counts_T)[has_any_T] - 1], limits_T[has_any_T]
    for at in np.flatnonzero(last_T >= limits_T)[:1]:
        raise ContentError(f"a delta changes element {last_T[at]} of a tensor of {limits_T[at]} elements")
    return positions


def _write_words(words_W: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the low `itemsize` bytes of uint64 words: first the lowest byte of each, and so on."""
    return np.ascontiguousarray(words_W.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :itemsize].T).reshape(-1)


def _write_all_words(words_W: np.ndarray, counts_T: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the words of T tensors, each tensor's as `_write_words` writes them."""
    written, bytes_W8 = np.empty(itemsize * words_W.size, dtype=np.uint8), words_W.astype("<u8").view(np.uint8)
    at_W, step_W = np.repeat(itemsize * _starts(counts_T), counts_T) + _within(counts_T), np.repeat(counts_T, counts_T)
    for byte in range(itemsize):
        written[at_W + byte * step_W] = bytes_W8[byte::8]
    return written


def _read_words(written: np.ndarray, counts_T: np.ndarray, itemsize: int) -> np.ndarray:
    """Read the words of T tensors: the inverse of `_write_words` for each: uint64 [sum of `counts_T`]."""
    words = np.zeros((int(counts_T.sum()), 8), dtype=np.uint8)
    at_W, step_W = np.repeat(itemsize * _starts(counts_T), counts_T) + _within(counts_T), np.repeat(counts_T, counts_T)
    for byte in range(itemsize):
        words[:, byte] = written[at_W + byte * step_W]
    return words.reshape(-1).view("<u8").astype(np.uint64)


def _starts(counts_T: np.ndarray) -> np.ndarray:
    """Return where each of T runs begins, which lie end to end."""
    starts: np.ndarray = np.cumsum(counts_T) - counts_T
    return starts


def _within(counts_T: np.ndarray) -> np.ndarray:
    """Return the numbers from 0 on of each of T runs, end to end."""
    numbers: np.ndarray = np.arange(int(counts_T.sum())) - np.repeat(_starts(counts_T), counts_T)
    return numbers


def _sums(values: np.ndarray, counts_T: np.ndarray) -> np.ndarray:
    """Return the sum of each of T runs of values, which lie end to end."""
    sums, ends_T = np.concatenate([[0], np.cumsum(values, dtype=np.int64)]), np.cumsum(counts_T)
    found: np.ndarray = sums[ends_T] - sums[ends_T - counts_T]
    return found


def _sign_extend(words_W: np.ndarray, itemsize: int) -> np.ndarray:
    shift = np.uint64(64 - 8 * itemsize)
    return (words_W << shift).view(np.int64) >> shift.astype(np.int64)

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


@dataclass(frozen=True)
class PlaneSizes:
    """The bytes of each plane that belong to a tensor, as `counts` lists them, and how they are to be read."""

    num_changes: int
    is_dense: bool
    counts: tuple[int, ...]  # of PLANES

    @classmethod
    def check(cls, num_changes: int, is_dense: bool, counts: Sequence[int], numel: int, itemsize: int) -> PlaneSizes:
        """Check sizes that came from outside.  Raises `ContentError` if no tensor of `numel` elements can have them."""
        gaps, directions, strides, magnitudes, wide = counts
        sparse = (
            not is_dense
            and num_changes <= gaps <= num_changes + numel // _ESCAPE
            and directions == -(-num_changes // 8)
            and magnitudes <= strides <= magnitudes + num_changes // _ESCAPE
            and magnitudes <= num_changes
            and wide % itemsize == 0
            and wide <= magnitudes * itemsize
            and sum(counts) <= numel * itemsize  # else it is written densely
        )
        dense = is_dense and wide == numel * itemsize and not (gaps or directions or strides or magnitudes)
        if not (0 <= num_changes <= numel and min(counts) >= 0 and (sparse or dense)):
            raise ContentError(
                f"a delta of {num_changes} changes in {numel} elements cannot have planes of {list(counts)} entries"
            )
        return cls(num_changes, is_dense, tuple(counts))


def write_planes(changes: Changes, numel: int, itemsize: int) -> tuple[PlaneSizes, list[np.ndarray]]:
    """Return the planes of one tensor, uint8 each, in the order of PLANES."""
    steps_N = changes.steps_N
    sizes_N = np.where(steps_N < 0, -steps_N, steps_N).view(np.uint64)  # the lowest int64 is right as a uint64
    larger_S = np.flatnonzero(sizes_N > 1)
    beyond_S = sizes_N[larger_S]
    magnitudes_S = np.minimum(beyond_S - np.uint64(2), _ESCAPE).astype(np.uint8)
    planes = [
        _write_gaps(changes.positions_N),
        np.packbits(steps_N < 0, bitorder="little"),
        _write_gaps(larger_S),
        magnitudes_S,
        _write_words(beyond_S[magnitudes_S == _ESCAPE], itemsize),
    ]
    is_dense = sum(plane.size for plane in planes) >= numel * itemsize > 0
    if is_dense:
        differences = np.zeros(numel, dtype=np.int64)
        differences[changes.positions_N] = steps_N
        nothing = np.empty(0, dtype=np.uint8)
        planes = [nothing] * 4 + [_write_words(differences.view(np.uint64), itemsize)]
    return PlaneSizes(int(steps_N.size), is_dense, tuple(plane.size for plane in planes)), planes


def read_planes(sizes: PlaneSizes, planes: Sequence[np.ndarray], numel: int, itemsize: int) -> Changes:
    """Read planes: the inverse of `write_planes`.  Raises `ContentError` for planes that contradict each other or leave
    the tensor.
    """
    return read_all_planes([sizes], planes, [numel], itemsize)


def read_all_planes(
    sizes: Sequence[PlaneSizes], planes: Sequence[np.ndarray], numels: Sequence[int], itemsize: int
) -> Changes:
    """Read the planes of T tensors, each plane of one tensor after the other.

    Returns the changes end to end; positions are counted in each tensor.  Raises as `read_planes`.
    """
    found, starts = [], [0] * len(PLANES)
    for is_dense, group in itertools.groupby(zip(sizes, numels, strict=True), lambda each: each[0].is_dense):
        some = list(group)
        for run in [[each] for each in some] if is_dense else [some]:
            counts_T5 = np.array([size.counts for size, _ in run], dtype=np.int64)
            stops = [start + int(count) for start, count in zip(starts, counts_T5.sum(0), strict=True)]
            parts = [plane[start:stop] for plane, start, stop in zip(planes, starts, stops, strict=True)]
            num_T = np.array([size.num_changes for size, _ in run], dtype=np.int64)
            if is_dense:
                found.append(_read_dense(parts[-1], int(num_T[0]), itemsize))
            else:
                found.append(_read_sparse(parts, counts_T5, num_T, np.array([numel for _, numel in run]), itemsize))
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


def _read_sparse(
    planes: Sequence[np.ndarray], counts_T5: np.ndarray, num_T: np.ndarray, numels_T: np.ndarray, itemsize: int
) -> Changes:
    gaps_G, directions, strides, magnitudes_S, wide = planes
    gaps_T, directions_T, strides_T, larger_T, wide_T = counts_T5.T
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


def invert_planes(sizes: PlaneSizes, planes: Sequence[np.ndarray], itemsize: int) -> list[np.ndarray]:
    """Return the planes of the way back, of the same sizes."""
    gaps_G, directions, strides, magnitudes_S, wide = planes
    if sizes.is_dense:
        differences = np.uint64(0) - _read_words(wide, np.array([wide.size // itemsize]), itemsize)
        return [gaps_G, directions, strides, magnitudes_S, _write_words(differences, itemsize)]
    bits = np.unpackbits(directions, bitorder="little")[: sizes.num_changes] ^ 1
    return [gaps_G, np.packbits(bits, bitorder="little"), strides, magnitudes_S, wide]


def _write_gaps(positions_N: np.ndarray) -> np.ndarray:
    """Return the distances between ascending positions, less one, counted from just before 0.  uint8 [G]."""
    gaps_N = np.diff(positions_N, prepend=-1) - 1
    escapes_N = gaps_N // _ESCAPE
    last_N = np.cumsum(escapes_N + 1) - 1
    written = np.full(int(last_N[-1]) + 1 if last_N.size else 0, _ESCAPE, dtype=np.uint8)
    written[last_N] = gaps_N % _ESCAPE
    return written


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

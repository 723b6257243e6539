"""The written form of `Changes`: five planes of bytes, each of one kind, so that each compresses by itself.

    gaps        distance to the next changed element, a byte each; 255 means: 255 further, and read on
    directions  one bit a change: away from zero (0) or towards it (1)
    strides     which changes are larger than one step: gaps again, counted in changes
    magnitudes  of these, the size of the step less two, a byte each; 255 means: it is in `wide`
    wide        step sizes that do not fit, or all differences of a dense tensor, as words, first bytes first

A tensor of which so much changed that this is no shorter than its bytes is written densely: the difference of every
word.  Turning the direction bits around, or negating dense differences, gives the way back.

All functions are vectorised.

N changed elements, G bytes of gaps, S changes larger than one step, W words in the wide plane.
"""

from __future__ import annotations

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
    gaps_G, directions, strides, magnitudes_S, wide = planes
    if sizes.is_dense:
        differences = _sign_extend(_read_words(wide, itemsize), itemsize)
        positions_N = np.flatnonzero(differences)
        if positions_N.size != sizes.num_changes:
            raise ContentError(f"received {positions_N.size} changes, expected {sizes.num_changes}")
        return Changes(positions_N, differences[positions_N])
    positions_N = _read_gaps(gaps_G, sizes.num_changes, numel)
    larger_S = _read_gaps(strides, magnitudes_S.size, sizes.num_changes)
    wide_W = _read_words(wide, itemsize)
    beyond_S = magnitudes_S.astype(np.uint64) + np.uint64(2)
    is_wide_S = magnitudes_S == _ESCAPE
    if np.count_nonzero(is_wide_S) != wide_W.size or (wide_W < _LEAST_WIDE).any():
        raise ContentError("the step sizes of a delta contradict each other")
    if (wide_W > np.uint64(1 << (8 * itemsize - 1))).any():
        raise ContentError(f"a step is too large for words of {itemsize} bytes")
    beyond_S[is_wide_S] = wide_W
    steps_N = np.ones(sizes.num_changes, dtype=np.uint64)
    steps_N[larger_S] = beyond_S
    bits = np.unpackbits(directions, bitorder="little")
    if bits[sizes.num_changes :].any():
        raise ContentError("a delta has more directions than changes")
    steps_N = np.where(bits[: sizes.num_changes].astype(bool), np.uint64(0) - steps_N, steps_N)
    return Changes(positions_N, steps_N.view(np.int64))


def invert_planes(sizes: PlaneSizes, planes: Sequence[np.ndarray], itemsize: int) -> list[np.ndarray]:
    """Return the planes of the way back, of the same sizes."""
    gaps_G, directions, strides, magnitudes_S, wide = planes
    if sizes.is_dense:
        differences = np.uint64(0) - _read_words(wide, itemsize)
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


def _read_gaps(gaps_G: np.ndarray, count: int, limit: int) -> np.ndarray:
    """Read positions: the inverse of `_write_gaps`: int64 [count], ascending, all below `limit`."""
    is_last_G = gaps_G != _ESCAPE
    if np.count_nonzero(is_last_G) != count or (gaps_G.size and not is_last_G[-1]):
        raise ContentError("the positions of a delta are cut off")
    positions: np.ndarray = np.cumsum(gaps_G + is_last_G.astype(np.int64), dtype=np.int64)[is_last_G] - 1
    if positions.size and int(positions[-1]) >= limit:
        raise ContentError(f"a delta changes element {int(positions[-1])} of a tensor of {limit} elements")
    return positions


def _write_words(words_W: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the low `itemsize` bytes of uint64 words: first the lowest byte of each, and so on."""
    return np.ascontiguousarray(words_W.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :itemsize].T).reshape(-1)


def _read_words(written: np.ndarray, itemsize: int) -> np.ndarray:
    """Read words: the inverse of `_write_words`: uint64 [W]."""
    words = np.zeros((written.size // itemsize, 8), dtype=np.uint8)
    words[:, :itemsize] = written.reshape(itemsize, -1).T
    return words.reshape(-1).view("<u8").astype(np.uint64)


def _sign_extend(words_W: np.ndarray, itemsize: int) -> np.ndarray:
    shift = np.uint64(64 - 8 * itemsize)
    return (words_W << shift).view(np.int64) >> shift.astype(np.int64)

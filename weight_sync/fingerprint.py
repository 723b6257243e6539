"""A fingerprint of a logical tensor that does not depend on how the tensor is sharded, and a digest over many of them.

    F(w) = sum over i of  h(i) * (w_i + 1)   mod 2^64
    h(i) = a(i // BLOCK) * b(i % BLOCK)       a(c) = mix(2c) | 1,  b(j) = mix(2j + 1) | 1

`w_i` is the element at flat index `i` as an unsigned integer of the dtype's own width, `mix(k)` the k-th output of the
splitmix64 generator (Steele, Lea and Flood, 2014) started at 0.  Every h(i) is odd, so a change of a single element
always changes F.  F is a sum, so shards add up and a delta updates it, and it depends on positions, so swapped rows or
experts show.  It guards against mistakes and bit errors, not against someone who forges tensors to match.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from weight_sync.block_sums import kernels_of, row_sums
from weight_sync.errors import WeightRequestError
from weight_sync.fingerprint_words import BLOCK, UNSIGNED, mix_odd, multipliers, signed
from weight_sync.tensor_meta import DTYPES, TensorMeta, dtype_name

_RUN_WORDS = 1 << 19  # of one chunk of runs
_SCATTERED_WORDS = 1 << 16  # of one chunk where every word's index is computed: 512 KiB for each of a few temporaries
_RUNS_OF_A_PHASE = 8  # fewer, and it is faster to compute every word's index
_BLOCK_BITS = BLOCK.bit_length() - 1
_MASK = (1 << 64) - 1
EXPONENTS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}
"""Bits that only infinities and NaN have all of: the exponent's, and the mantissa's where there are no infinities."""

Index = Sequence[int | slice]


def fingerprint(tensor: torch.Tensor, offset: int = 0) -> int:
    """Return F of a tensor in [0, 2^64), or of a contiguous shard of one.

    `tensor`: any shape, any dtype of `DTYPES`, any device; read in row-major order (a tensor that is not contiguous
    is copied first).  `offset`: flat index, in the whole logical tensor, of the shard's first element.
    Scratch memory is a few MiB whatever the size.  An empty tensor gives 0.
    """
    return _contiguous(_words(tensor), offset)


def fingerprint_slice(tensor: torch.Tensor, full_shape: Sequence[int], index: Index) -> int:
    """Return what `tensor == full[index]` contributes to F of `full`, a logical tensor of shape `full_shape`.

    `index`: a whole number or a slice (any step of at least 1) for each leading dimension, as in `Piece`; dimensions
    that it does not name are whole.  The contributions of shards that cover `full` without overlap add up (`combine`)
    to `fingerprint(full)`.  A shard whose elements are one run of `full` (leading dimensions cut) is as fast as
    `fingerprint`.  Columns take several times as long, and where the length of a row is an odd number of words, or runs
    are a few words long, every word's index is computed.

    Raises `WeightRequestError` when `index` does not fit `full_shape`, or `tensor` is not of the shape that it selects.

    R runs of N consecutive elements.
    """
    starts, run = _runs(full_shape, index)
    if tensor.numel() != starts.numel() * run or tuple(tensor.shape) != _selected_shape(full_shape, index):
        raise WeightRequestError(
            f"a slice of shape {list(tensor.shape)} is not {_described(index)} of a tensor of shape {list(full_shape)}"
        )
    words = _words(tensor)
    if words.numel() == 0:
        return 0
    words_RN = words.view(-1, run)
    if len(words_RN) == 1 or run >= _SCATTERED_WORDS:
        return combine(*(_contiguous(words, int(start)) for words, start in zip(words_RN, starts, strict=True)))
    phases_R = starts & (BLOCK - 1)
    phases = phases_R.unique().tolist()
    if len(phases) * _RUNS_OF_A_PHASE <= len(starts):
        values = []
        for phase in phases:
            for some in (phases_R == phase).nonzero().view(-1).split(_RUN_WORDS // run):
                rows = RowPrints(run, phase, (starts[some] >> _BLOCK_BITS).tolist(), words.device)
                values += rows.of(words_RN[some.to(words.device)]).tolist()
        return combine(*values)
    total, within, step = 0, torch.arange(run), _SCATTERED_WORDS // run
    for first in range(0, len(words_RN), step):
        indices = (starts[first : first + step, None] + within).view(-1).to(words_RN.device)
        total += _scattered(indices, words_RN[first : first + step].to(torch.int64).view(-1) + 1)
    return total & _MASK


def word_factors(full_shape: Sequence[int], index: Index) -> torch.Tensor:
    """Return h of each element of a slice, row-major: int64 [n].  An element adds h times its word plus one to F.

    `full_shape`, `index`: as in `fingerprint_slice`.
    """
    starts, run = _runs(full_shape, index)
    return _factors((starts.view(-1, 1) + torch.arange(run)).view(-1))


def fingerprint_update(value: int, flat_indices: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> int:
    """Return F of a tensor after the elements at `flat_indices` changed from `old` to `new`, from its F before.

    `flat_indices`: int64 [n], each index once.  `old`, `new`: [n], of the tensor's dtype.  The time depends on n only.
    With `old` and `new` exchanged it takes the change back.  Raises `WeightRequestError` when the three do not match.
    """
    if not flat_indices.shape == old.shape == new.shape or flat_indices.dim() != 1 or old.dtype != new.dtype:
        raise WeightRequestError("a delta needs equally many indices, old and new elements, and one dtype")
    if flat_indices.dtype != torch.int64:
        raise WeightRequestError(f"flat indices are int64, got {dtype_name(flat_indices.dtype)}")
    before, after = _words(old), _words(new)
    for start in range(0, flat_indices.numel(), _SCATTERED_WORDS):
        chunk = slice(start, start + _SCATTERED_WORDS)
        difference = after[chunk].to(torch.int64) - before[chunk].to(torch.int64)
        value += _scattered(flat_indices[chunk], difference)
    return value & _MASK


def fingerprint_changes(
    positions_N: np.ndarray, old_N: np.ndarray, new_N: np.ndarray, counts_T: np.ndarray
) -> np.ndarray:
    """Return what the changes of T tensors add to F of each, uint64 [T], which wraps.

    `positions_N`: flat indices, int64 [N], `counts_T` of each tensor.  `old_N`, `new_N`: unsigned words.
    """
    products_N = _factors(torch.from_numpy(positions_N)).numpy().view(np.uint64)
    products_N *= new_N.astype(np.uint64) - old_N.astype(np.uint64)
    sums, ends_T = np.concatenate([np.zeros(1, np.uint64), np.cumsum(products_N, dtype=np.uint64)]), np.cumsum(counts_T)
    found: np.ndarray = sums[ends_T] - sums[ends_T - counts_T]
    return found


def combine(*parts: int) -> int:
    """Return F of a tensor from the fingerprints of the shards that make it up."""
    return sum(parts) & _MASK


def fingerprint_hex(value: int) -> str:
    """Return the wire form of a fingerprint: 16 lower-case hex digits."""
    return f"{value:016x}"


def wrong_fingerprint(name: str, actual: int, expected: int) -> str:
    """Return the message for a tensor with another F than the one stated."""
    return f"{name}: fingerprint {fingerprint_hex(actual)}, the manifest expects {fingerprint_hex(expected)}"


def parse_fingerprint(text: str) -> int:
    """Read the result of `fingerprint_hex`.  Raises `WeightRequestError` on anything but 16 hex digits."""
    digits = text.lower()
    if len(digits) != 16 or set(digits) - set("0123456789abcdef"):
        raise WeightRequestError(f"a fingerprint is 16 hex digits, got {text[:40]!r}")
    return int(digits, 16)


def digest(entries: Iterable[tuple[TensorMeta, int]]) -> str:
    """Return SHA-256 (64 hex digits) over (name, dtype, shape, F) of every tensor, whatever order they come in.

    Names the content of a weight version: equal digests on two sides mean equal tensors under equal names.
    """
    lines = sorted(
        f"{meta.name}\0{dtype_name(meta.dtype)}\0{','.join(map(str, meta.shape))}\0{fingerprint_hex(value)}\n"
        for meta, value in entries
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in DTYPES.values():
        raise WeightRequestError(f"no fingerprint for dtype {dtype_name(tensor.dtype)}")
    return tensor.detach().contiguous().view(-1).view(UNSIGNED[tensor.dtype.itemsize])


def _contiguous(words: torch.Tensor, offset: int) -> int:
    """Sum over `words` [n], whose first is at flat index `offset`."""
    if (kernels := kernels_of(words.device)) is not None:
        return int(kernels.gpu_sum(words, offset)) & _MASK
    if words.numel() == 0:
        return 0
    return int(_one_row(words.numel(), offset, words.device).of(words.view(1, -1))) & _MASK


class RowPrints:
    """F of S rows of `size` words each, more than none, of which row s begins `phase` words into block `firsts[s]`.

    One block in `firsts` is that of all rows.
    """

    def __init__(self, size: int, phase: int, firsts: Sequence[int], device: torch.device) -> None:
        self._phase = phase
        num_blocks, last = -(-(phase + size) // BLOCK), (phase + size - 1) % BLOCK + 1
        sums = _sums_of_multipliers()
        ones = [sums[BLOCK]] * num_blocks  # for the "+ 1" of every word
        ones[0] -= sums[phase]
        ones[-1] -= sums[BLOCK] - sums[last]
        self._ones_K = torch.tensor([signed(one & _MASK) for one in ones], device=device)
        blocks_SK = torch.tensor(firsts, device=device).view(-1, 1) + torch.arange(num_blocks, device=device)
        self._factors_SK = mix_odd(2 * blocks_SK)

    def of(self, words_SJ: torch.Tensor) -> torch.Tensor:
        """Return F of each row, int64 [S], which wraps."""
        return self.of_sums(row_sums(words_SJ, self._phase))

    def of_sums(self, sums_SK: torch.Tensor) -> torch.Tensor:
        """Return F of each row by the sums of its blocks, as `shard_sums` gives them."""
        return ((sums_SK + self._ones_K) * self._factors_SK).sum(1)


@functools.lru_cache(maxsize=32)  # models have few shapes; each holds 16 bytes for a block
def _one_row(size: int, offset: int, device: torch.device) -> RowPrints:
    first, phase = divmod(offset, BLOCK)
    return RowPrints(size, phase, [first], device)


@functools.cache
def _sums_of_multipliers() -> list[int]:
    """Return the sum of the first n multipliers of a block's words, for n from 0 to `BLOCK`."""
    return [0, *itertools.accumulate(multipliers("cpu").tolist())]


def _scattered(flat_indices: torch.Tensor, factors: torch.Tensor) -> int:
    """Sum h(i) times a factor over indices anywhere; both int64 [n]."""
    return int(_factors(flat_indices).mul_(factors).sum())


def _factors(flat_indices: torch.Tensor) -> torch.Tensor:
    """Return h(i) of indices anywhere; both int64 [n]."""
    if flat_indices.numel() == 0:
        return torch.zeros_like(flat_indices)
    blocks = flat_indices >> _BLOCK_BITS
    first, last = (int(edge) for edge in torch.aminmax(blocks))
    if last - first < flat_indices.numel():
        a = mix_odd(2 * torch.arange(first, last + 1, device=blocks.device))[blocks - first]
    else:
        a = mix_odd(2 * blocks)
    return a.mul_(multipliers(str(blocks.device))[flat_indices & (BLOCK - 1)])


def _runs(full_shape: Sequence[int], index: Index) -> tuple[torch.Tensor, int]:
    """Return the flat index of the first element of every run of a slice, in row-major order (int64 [n]), and a run's
    length.
    """
    starts, run, in_run = torch.zeros(1, dtype=torch.int64), 1, True
    for position, (axis, stride) in reversed(list(enumerate(_axes(full_shape, index)))):
        if in_run and axis.step == 1:
            run *= len(axis)
            starts = starts + axis.start * stride
            in_run = len(axis) == full_shape[position]
            continue
        in_run = False
        starts = (torch.arange(axis.start, axis.stop, axis.step)[:, None] * stride + starts).view(-1)
    return starts, run


def _axes(full_shape: Sequence[int], index: Index) -> Iterator[tuple[range, int]]:
    """Yield the selected range of each dimension, and the dimension's stride in elements."""
    if len(index) > len(full_shape):
        raise WeightRequestError(f"{_described(index)} has more dimensions than {list(full_shape)}")
    for position, size in enumerate(full_shape):
        at = index[position] if position < len(index) else slice(None)
        if isinstance(at, int):
            if not 0 <= at < size:
                raise WeightRequestError(f"{_described(index)} is outside of {list(full_shape)}")
            at = slice(at, at + 1)
        selected = range(size)[at]
        if selected.step < 1:
            raise WeightRequestError(f"{_described(index)} runs backwards")
        yield selected, math.prod(full_shape[position + 1 :])


def _selected_shape(full_shape: Sequence[int], index: Index) -> tuple[int, ...]:
    axes = enumerate(_axes(full_shape, index))
    return tuple(len(axis) for at, (axis, _) in axes if at >= len(index) or isinstance(index[at], slice))


def _described(index: Index) -> str:
    """Return the index as one writes it: `[3, 0:16]`."""
    parts = [
        str(at) if isinstance(at, int) else ":".join("" if edge is None else str(edge) for edge in (at.start, at.stop))
        for at in index
    ]
    return f"[{', '.join(parts)}]"

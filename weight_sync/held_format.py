"""The formats of logical tensors that are not held as they are sent: quantised when they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from weight_sync import fp8_blocks, int4_groups, int8_blocks
from weight_sync.errors import ContentError
from weight_sync.fp8_blocks import BLOCK
from weight_sync.pair_tables import PairForm
from weight_sync.tensor_meta import Pair, Piece

_SCALES_BELOW = 2.0**120


@dataclass(frozen=True)
class PairFormat:
    """The two ways between values and pairs, whose elements have dtype `element`.

    `quantise` raises `ContentError` for a value that is not finite.  `values` gives a pair's values in a dtype.
    `not_a_number` gives a pair of a matrix of that shape whose values are all NaN.
    """

    element: torch.dtype
    quantise: Callable[[torch.Tensor], Pair]
    values: Callable[[Pair, torch.dtype], torch.Tensor]
    not_a_number: Callable[[Sequence[int]], Pair]


@dataclass(frozen=True)
class HeldFormat:
    """`values` gives what is held of a tensor, in its dtype.  `of_pairs`: also of one that came quantised otherwise.

    `flag`: what asks for it, for refusals.  `block`: the rows and columns that are quantised together.  `form`: what
    `take_pairs` calls it.  `pairs`: given where pairs are held, which values do not determine.
    """

    values: Callable[[torch.Tensor], torch.Tensor]
    of_pairs: bool
    flag: str
    block: tuple[int, int]
    form: PairForm
    pairs: PairFormat | None = None

    def keeps(self, pair: Pair | None) -> bool:
        """Return whether a pair is held as it came."""
        return pair is not None and self.pairs is not None and pair.weight.dtype == self.pairs.element

    @property
    def is_int8_blocks(self) -> bool:
        """True for blocks of 8 bits, to which `take_spans` converts."""
        return self.form is PairForm.INT8

    def unsent(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | Pair:
        """Return content for a tensor that no sender has: NaN, or the largest number where the format has no NaN."""
        if self.pairs is not None:
            return self.pairs.not_a_number(shape)
        return torch.full(tuple(shape), torch.finfo(dtype).max, dtype=dtype)


def _of_pairs(pairs: PairFormat, name: str, block: tuple[int, int], form: PairForm) -> HeldFormat:
    def values(sent: torch.Tensor) -> torch.Tensor:
        return pairs.values(pairs.quantise(sent), sent.dtype)

    return HeldFormat(values, True, f"--cpu-weight-format {name}", block, form, pairs)


def _int4(name: str, group: int) -> HeldFormat:
    pairs = PairFormat(
        torch.int8,
        lambda values: int4_groups.quantise(values, group),
        int4_groups.dequantise,
        lambda shape: int4_groups.not_a_number(shape, group),
    )
    return _of_pairs(pairs, name, (1, group), PairForm.INT4)


_FP8_BLOCK = (BLOCK, BLOCK)
_FP8_PAIRS = PairFormat(
    fp8_blocks.QUANTISED,
    lambda values: Pair(*fp8_blocks.quantise(values)),
    lambda pair, dtype: fp8_blocks.dequantise(pair.weight, pair.scale, dtype),
    lambda shape: Pair(*fp8_blocks.not_a_number(shape)),
)
FP8_BLOCKS = HeldFormat(fp8_blocks.requantised, False, "--quantize-weight-updates", _FP8_BLOCK, PairForm.FP8)
"""The values of FP8 blocks, in the model's dtype."""
INT8_BLOCKS = HeldFormat(int8_blocks.held_values, True, "--cpu-weight-format w8", (1, int8_blocks.BLOCK), PairForm.INT8)
FP8_PAIRS = _of_pairs(_FP8_PAIRS, "fp8", _FP8_BLOCK, PairForm.FP8)
INT4_GROUPS = _int4("int4", 32)
INT4_GROUPS_128 = _int4("int4-128", 128)
HeldFormats = Mapping[str, HeldFormat]
"""By the names of logical tensors; the others are held as they were sent."""
AS_SENT: HeldFormats = MappingProxyType({})


# --- pairs that are held as they came, and pieces of them ------------------------------------------------------------


def kept_pair(piece: Piece, wire_name: str, pair: Pair | None, held: HeldFormat | None) -> Pair | None:
    """Return the piece of the pair of a wire tensor, where that is held as it came; else None.

    Raises `ContentError` for blocks that the piece cuts, and for scales that the kernels do not take.
    """
    if pair is None or held is None or not held.keeps(pair):
        return None
    if pair.block[1] % held.block[1]:
        raise ContentError(
            f"{piece.name} has groups of {pair.block[1]}, but {held.flag} holds groups of {held.block[1]}"
        )
    if pair.block != held.block:  # so that a rank's shard cuts no group
        pair = int4_groups.regrouped(pair, held.block[1])
    if piece == Piece(piece.name):
        return _with_scales_that_fit(pair, piece.name, held)
    spans = (*piece.index, *[slice(None)] * (pair.weight.dim() - len(piece.index)))[-2:]
    for span, size in zip(spans, pair.weight.shape[-2:], strict=True):
        rows = range(size)[span] if isinstance(span, slice) else range(0)
        if not (size <= BLOCK or (rows.step == 1 and rows.start % BLOCK == 0)):
            raise ContentError(
                f"{piece.name} begins inside a block of {wire_name}: {held.flag} holds whole blocks. "
                "Send each expert's matrices by themselves."
            )
    return _with_scales_that_fit(piece_of(piece, pair), piece.name, held)


def _with_scales_that_fit(pair: Pair, name: str, held: HeldFormat) -> Pair:
    if bool((pair.scale.float() >= _SCALES_BELOW).any()):
        raise ContentError(f"{name} has a scale of 2**120 or more, which {held.flag} does not hold")
    return pair


def piece_of(piece: Piece, pair: Pair) -> Pair:
    """Return the piece of both halves of an FP8 pair; of scales one for every block that the piece touches.

    No model splits a matrix that comes in another kind.
    """
    assert pair.block == _FP8_BLOCK, piece
    of_scale = piece._replace(index=fp8_blocks.scales_of(piece.index, pair.weight.shape))
    return Pair(piece.of(pair.weight), of_scale.of(pair.scale), pair.block)

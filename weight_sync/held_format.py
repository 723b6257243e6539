"""The formats of logical tensors that are not held as they are sent: quantised when they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from weight_sync import fp8_blocks, int4_groups, int8_blocks
from weight_sync.tensor_meta import Pair


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

    `flag`: what asks for it, for refusals.  `block`: the rows and columns that are quantised together.  `pairs`: given
    where pairs are held, which values do not determine.
    """

    values: Callable[[torch.Tensor], torch.Tensor]
    of_pairs: bool
    flag: str
    block: tuple[int, int]
    pairs: PairFormat | None = None

    def keeps(self, pair: Pair | None) -> bool:
        """Return whether a pair is held as it came."""
        return pair is not None and self.pairs is not None and pair.weight.dtype == self.pairs.element

    @property
    def is_int8_blocks(self) -> bool:
        """True for blocks of 8 bits, to which `take_spans` converts."""
        return self.values is int8_blocks.held_values

    def unsent(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | Pair:
        """Return content for a tensor that no sender has: NaN, or the largest number where the format has no NaN."""
        if self.pairs is not None:
            return self.pairs.not_a_number(shape)
        return torch.full(tuple(shape), torch.finfo(dtype).max, dtype=dtype)


def _of_pairs(pairs: PairFormat, name: str, block: tuple[int, int]) -> HeldFormat:
    def values(sent: torch.Tensor) -> torch.Tensor:
        return pairs.values(pairs.quantise(sent), sent.dtype)

    return HeldFormat(values, True, f"--cpu-weight-format {name}", block, pairs)


def _int4(name: str, group: int) -> HeldFormat:
    pairs = PairFormat(
        torch.int8,
        lambda values: int4_groups.quantise(values, group),
        int4_groups.dequantise,
        lambda shape: int4_groups.not_a_number(shape, group),
    )
    return _of_pairs(pairs, name, (1, group))


_FP8_BLOCK = (fp8_blocks.BLOCK, fp8_blocks.BLOCK)
_FP8_PAIRS = PairFormat(
    fp8_blocks.QUANTISED,
    lambda values: Pair(*fp8_blocks.quantise(values)),
    lambda pair, dtype: fp8_blocks.dequantise(pair.weight, pair.scale, dtype),
    lambda shape: Pair(*fp8_blocks.not_a_number(shape)),
)
FP8_BLOCKS = HeldFormat(fp8_blocks.requantised, False, "--quantize-weight-updates", _FP8_BLOCK)
"""The values of FP8 blocks, in the model's dtype."""
INT8_BLOCKS = HeldFormat(int8_blocks.held_values, True, "--cpu-weight-format w8", (1, int8_blocks.BLOCK))
FP8_PAIRS = _of_pairs(_FP8_PAIRS, "fp8", _FP8_BLOCK)
INT4_GROUPS = _int4("int4", 32)
INT4_GROUPS_128 = _int4("int4-128", 128)
HeldFormats = Mapping[str, HeldFormat]
"""By the names of logical tensors; the others are held as they were sent."""
AS_SENT: HeldFormats = MappingProxyType({})

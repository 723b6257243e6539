"""INT4 weights on the wire and in checkpoints, in compressed-tensors' form `pack-quantized`.

    X.weight_packed   int32 [R, C / 8]        eight integers a word, the first in the lowest bits, each plus 8
    X.weight_scale    bfloat16 [R, C / group] groups of 32 or 128 neighbouring elements of a row
    X.weight_shape    int64 or int32 [2]      R and C

Checkpoints have these names, and so have trainers that pack the weights of each step themselves (slime, miles, SkyRL).

Shapes: R output features, C input features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from weight_sync.errors import ContentError, CoverageError, DtypeMismatchError, ShapeMismatchError, shown
from weight_sync.int4_groups import dequantise
from weight_sync.tensor_meta import LogicalWeights, Pair, TensorMeta, dtype_name

GROUPS = (32, 128)
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_DTYPES = {_PACKED: (torch.int32,), _SCALE: (torch.bfloat16,), _SHAPE: (torch.int64, torch.int32)}
_OF_WORD = 8
_OFFSET = 8


class Int4Wire:
    """The `PairKind` of INT4: words, scales and the shape of a weight."""

    label = "INT4"
    suffixes: tuple[str, ...] = (_PACKED, _SCALE, _SHAPE)

    def suffix_of(self, meta: TensorMeta) -> str | None:
        """Return the suffix of a part; None for another tensor."""
        return next((suffix for suffix in self.suffixes if meta.name.endswith(f".weight{suffix}")), None)

    def check_part(self, weights: LogicalWeights, name: str, suffix: str, meta: TensorMeta) -> None:
        """Check one part.  Raises `DtypeMismatchError`, `ShapeMismatchError`."""
        if meta.dtype not in _DTYPES[suffix]:
            wanted = " or ".join(map(dtype_name, _DTYPES[suffix]))
            raise DtypeMismatchError(
                f"{shown(meta.name)} is a part of INT4 and must be {wanted}, got {dtype_name(meta.dtype)}"
            )
        is_right, expected = (meta.shape == (2,), "[2]") if suffix == _SHAPE else (len(meta.shape) == 2, "a matrix's")
        if not is_right:
            raise ShapeMismatchError(f"{meta.name} has shape {list(meta.shape)}, expected {expected}")

    def check_parts(self, name: str, parts: Mapping[str, TensorMeta]) -> None:
        """Check that words and scales have rows and groups of one matrix.  Raises `ShapeMismatchError`."""
        group_of(name, parts[_PACKED].shape, parts[_SCALE].shape)

    def value_shape(self, first: TensorMeta) -> tuple[int, ...]:
        """Return the shape of a weight by its words."""
        rows, words = first.shape
        return rows, words * _OF_WORD

    def missing(self, name: str, found: Collection[str]) -> CoverageError:
        """Return the error of a weight that lacks a part."""
        absent = next(suffix for suffix in self.suffixes if suffix not in found)
        return CoverageError(f"{name}{absent} is missing, another part of {name}{next(iter(found))}")

    def put_together(
        self, name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Pair]:
        """Return the values, rounded to bfloat16 and then to `dtype`, and the pair.

        Raises `ShapeMismatchError`, `ContentError` for another shape than that of the words, and for a scale that is
        not finite and above zero.
        """
        packed, scale = parts[_PACKED], parts[_SCALE]
        group = group_of(name, tuple(packed.shape), tuple(scale.shape))
        shape, found = parts[_SHAPE].tolist(), [packed.shape[0], packed.shape[1] * _OF_WORD]
        if shape != found:
            raise ContentError(f"{name}{_SHAPE} is {shape}, but {name}{_PACKED} has {found}")
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ContentError(f"{name}{_SCALE}: a scale is zero, negative or not finite")
        pair = Pair(unpacked(packed), scale, (1, group))
        return dequantise(pair, torch.bfloat16).to(dtype), pair


def group_of(name: str, packed: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """Return the elements that share a scale.  Raises `ShapeMismatchError` for shapes that are not this form's."""
    if len(packed) == len(scale) == 2 and packed[0] == scale[0] and scale[1] > 0:
        group, rest = divmod(packed[1] * _OF_WORD, scale[1])
        if rest == 0 and group in GROUPS:
            return group
    raise ShapeMismatchError(
        f"{name} is not in INT4: {_PACKED} {list(packed)} and {_SCALE} {list(scale)}, expected [R, C / 8] and "
        "[R, C / 32] or [R, C / 128]"
    )


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the integers of words int32 [R, W]: int8 [R, 8 W]."""
    bytes_RB = packed.contiguous().view(torch.uint8)  # of a word the lowest first
    halves_RB2 = torch.stack((bytes_RB & 15, bytes_RB >> 4), -1).to(torch.int8)
    return halves_RB2.flatten(1) - _OFFSET

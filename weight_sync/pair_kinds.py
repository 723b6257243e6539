"""The forms of quantised weights that come in parts, on the wire and in checkpoints: `PairKind`.

    FP8    X.weight         float8_e4m3fn [..., R, C]
           X.weight_scale_inv             [..., R / 128, C / 128], as `fp8_blocks` defines it

    INT4   X.weight_packed  int32 [R, C / 8]        eight integers a word, the first in the lowest bits, each plus 8
           X.weight_scale   bfloat16 [R, C / group] groups of 32 or 128 neighbouring elements of a row
           X.weight_shape   int64 or int32 [2]      R and C

FP8 has fused experts as well (`experts.gate_up_proj` and `experts.gate_up_proj_scale_inv`).  A tensor is one of an FP8
pair if its dtype is float8_e4m3fn and the model's is another floating-point type, or if it has the name of a pair's
scales.  INT4 is compressed-tensors' form `pack-quantized`; trainers that pack the weights of each step themselves have
it, too (slime, miles, SkyRL).

Shapes: R output features, C input features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from weight_sync import int4_groups
from weight_sync.errors import (
    ContentError,
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    WeightRequestError,
    shown,
)
from weight_sync.fp8_blocks import QUANTISED, SCALE_DTYPES, SCALE_SUFFIX, dequantise, scale_shape
from weight_sync.tensor_meta import LogicalWeights, Pair, TensorMeta, dtype_name

GROUPS = (32, 128)
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_INT4_DTYPES = {_PACKED: (torch.int32,), _SCALE: (torch.bfloat16,), _SHAPE: (torch.int64, torch.int32)}
_OF_WORD = 8
_OFFSET = 8


class PairKind(Protocol):
    """A form of quantised weights.  `label` is its name in messages.

    `suffixes`: what the names of its parts have behind the name of the weight.  The first part has the elements: it
    shows the shape of the weight.  `element`: the dtype of a part whose suffix is empty; None where there is none.
    """

    label: str
    suffixes: tuple[str, ...]
    element: torch.dtype | None

    def suffix_of(self, meta: TensorMeta) -> str | None:
        """Return the suffix of a tensor that is a part, going by its name and dtype alone; None if it is none."""

    def check_part(self, weights: LogicalWeights, name: str, suffix: str, meta: TensorMeta) -> None:
        """Check one part of the weight `name`.  Raises `DtypeMismatchError`, `ShapeMismatchError`."""

    def check_parts(self, name: str, parts: Mapping[str, TensorMeta]) -> None:
        """Check that all parts of a weight, by suffix, belong together.  Raises `ShapeMismatchError`."""

    def value_shape(self, first: TensorMeta) -> tuple[int, ...]:
        """Return the shape of a weight by its first part."""

    def missing(self, name: str, found: Collection[str]) -> CoverageError:
        """Return the error of a weight of which only the parts with the suffixes `found` came."""

    def put_together(
        self, name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Pair]:
        """Return the values of a weight in `dtype`, and its pair.  Values of INT4 are rounded to bfloat16 first.

        Raises `DtypeMismatchError`, `ShapeMismatchError`, `ContentError` for parts that do not belong together, and for
        a wrong scale.
        """


class _Fp8(PairKind):
    label = "FP8"
    suffixes = ("", SCALE_SUFFIX)
    element = QUANTISED

    def suffix_of(self, meta: TensorMeta) -> str | None:
        if meta.name.endswith(SCALE_SUFFIX):
            return SCALE_SUFFIX
        return "" if meta.dtype == QUANTISED else None

    def check_part(self, weights: LogicalWeights, name: str, suffix: str, meta: TensorMeta) -> None:
        if not suffix:
            if len(meta.shape) < 2:
                raise ShapeMismatchError(
                    f"{meta.name} is {dtype_name(meta.dtype)} but not a matrix, so it has no blocks"
                )
            return
        if meta.dtype not in SCALE_DTYPES:
            kinds = ", ".join(map(dtype_name, SCALE_DTYPES))
            raise DtypeMismatchError(f"{meta.name}: scales must be one of {kinds}, got {dtype_name(meta.dtype)}")
        weight = weights.metas().get(name)  # a fused one's shape shows when it comes
        if weight is not None:
            self._require_scales(meta, weight.shape)

    def check_parts(self, name: str, parts: Mapping[str, TensorMeta]) -> None:
        self._require_scales(parts[SCALE_SUFFIX], parts[""].shape)

    def value_shape(self, first: TensorMeta) -> tuple[int, ...]:
        return first.shape

    def missing(self, name: str, found: Collection[str]) -> CoverageError:
        if "" in found:
            return CoverageError(f"{name} is {dtype_name(QUANTISED)} and has no {name}{SCALE_SUFFIX}")
        return CoverageError(f"{name}{SCALE_SUFFIX} has no {dtype_name(QUANTISED)} {name}")

    def put_together(
        self, name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Pair]:
        pair = Pair(parts[""], parts[SCALE_SUFFIX])
        try:
            return dequantise(pair.weight, pair.scale, dtype), pair
        except WeightRequestError as error:
            raise type(error)(f"{name}{SCALE_SUFFIX}: {error}") from None

    @staticmethod
    def _require_scales(meta: TensorMeta, weight_shape: tuple[int, ...]) -> None:
        expected = scale_shape(weight_shape)
        if meta.shape != expected:
            raise ShapeMismatchError(f"{meta.name} has shape {list(meta.shape)}, expected {list(expected)}")


class _Int4(PairKind):
    label = "INT4"
    suffixes = (_PACKED, _SCALE, _SHAPE)
    element = None

    def suffix_of(self, meta: TensorMeta) -> str | None:
        return next((suffix for suffix in self.suffixes if meta.name.endswith(f".weight{suffix}")), None)

    def check_part(self, weights: LogicalWeights, name: str, suffix: str, meta: TensorMeta) -> None:
        if meta.dtype not in _INT4_DTYPES[suffix]:
            wanted = " or ".join(map(dtype_name, _INT4_DTYPES[suffix]))
            raise DtypeMismatchError(
                f"{shown(meta.name)} is a part of INT4 and must be {wanted}, got {dtype_name(meta.dtype)}"
            )
        is_right, expected = (meta.shape == (2,), "[2]") if suffix == _SHAPE else (len(meta.shape) == 2, "a matrix's")
        if not is_right:
            raise ShapeMismatchError(f"{meta.name} has shape {list(meta.shape)}, expected {expected}")

    def check_parts(self, name: str, parts: Mapping[str, TensorMeta]) -> None:
        group_of(name, parts[_PACKED].shape, parts[_SCALE].shape)

    def value_shape(self, first: TensorMeta) -> tuple[int, ...]:
        rows, words = first.shape
        return rows, words * _OF_WORD

    def missing(self, name: str, found: Collection[str]) -> CoverageError:
        absent = next(suffix for suffix in self.suffixes if suffix not in found)
        return CoverageError(f"{name}{absent} is missing, another part of {name}{next(iter(found))}")

    def put_together(
        self, name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Pair]:
        packed, scale = parts[_PACKED], parts[_SCALE]
        group = group_of(name, tuple(packed.shape), tuple(scale.shape))
        shape, found = parts[_SHAPE].tolist(), [packed.shape[0], packed.shape[1] * _OF_WORD]
        if shape != found:
            raise ContentError(f"{name}{_SHAPE} is {shape}, but {name}{_PACKED} has {found}")
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ContentError(f"{name}{_SCALE}: a scale is zero, negative or not finite")
        pair = Pair(_unpacked(packed), scale, (1, group))
        return int4_groups.dequantise(pair, torch.bfloat16).to(dtype), pair


FP8 = _Fp8()
INT4 = _Int4()
KINDS: tuple[PairKind, ...] = (FP8, INT4)


def is_other_fp8(dtype: torch.dtype) -> bool:
    """Return whether it is a kind of FP8 that has no blocks here."""
    return dtype.itemsize == 1 and dtype.is_floating_point and dtype != QUANTISED


def refuse_other_fp8(meta: TensorMeta, held: torch.dtype | None) -> None:
    """Raise `DtypeMismatchError` for a kind of FP8 that has no blocks here, where the model holds `held`."""
    if is_other_fp8(meta.dtype) and held is not None:
        raise DtypeMismatchError(f"{meta.name}: the model has {dtype_name(held)}, got {dtype_name(meta.dtype)}")


def group_of(name: str, packed: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """Return the elements of INT4 that share a scale.  Raises `ShapeMismatchError` for shapes that are not its own."""
    if len(packed) == len(scale) == 2 and packed[0] == scale[0] and scale[1] > 0:
        group, rest = divmod(packed[1] * _OF_WORD, scale[1])
        if rest == 0 and group in GROUPS:
            return group
    raise ShapeMismatchError(
        f"{name} is not in INT4: {_PACKED} {list(packed)} and {_SCALE} {list(scale)}, expected [R, C / 8] and "
        "[R, C / 32] or [R, C / 128]"
    )


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the integers of words int32 [R, W]: int8 [R, 8 W]."""
    bytes_RB = packed.contiguous().view(torch.uint8)  # of a word the lowest first
    halves_RB2 = torch.stack((bytes_RB & 15, bytes_RB >> 4), -1).to(torch.int8)
    return halves_RB2.flatten(1) - _OFFSET

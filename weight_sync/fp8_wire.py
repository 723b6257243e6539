"""FP8 weights on the wire and in checkpoints: every quantised tensor comes with the tensor of its scales.

    model.layers.0.mlp.experts.3.up_proj.weight             model.layers.0.mlp.experts.gate_up_proj
    model.layers.0.mlp.experts.3.up_proj.weight_scale_inv   model.layers.0.mlp.experts.gate_up_proj_scale_inv

A tensor is one of a pair if its dtype is float8_e4m3fn and the model's is another floating-point type, or if it has the
name of a pair's scales.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from weight_sync.errors import CoverageError, DtypeMismatchError, ShapeMismatchError, WeightRequestError
from weight_sync.fp8_blocks import QUANTISED, SCALE_DTYPES, SCALE_SUFFIX, dequantise, scale_shape
from weight_sync.tensor_meta import LogicalWeights, Pair, TensorMeta, dtype_name


class Fp8Wire:
    """The `PairKind` of FP8 blocks: a weight and its scales."""

    label = "FP8"
    suffixes: tuple[str, ...] = ("", SCALE_SUFFIX)

    def suffix_of(self, meta: TensorMeta) -> str | None:
        """Return the suffix of a part; None for another tensor."""
        if meta.name.endswith(SCALE_SUFFIX):
            return SCALE_SUFFIX
        return "" if meta.dtype == QUANTISED else None

    def check_part(self, weights: LogicalWeights, name: str, suffix: str, meta: TensorMeta) -> None:
        """Check a weight or scales.  Raises `DtypeMismatchError`, `ShapeMismatchError`."""
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
            _require_scales(meta, weight.shape)

    def check_parts(self, name: str, parts: Mapping[str, TensorMeta]) -> None:
        """Check the shape of scales by their weight.  Raises `ShapeMismatchError`."""
        _require_scales(parts[SCALE_SUFFIX], parts[""].shape)

    def value_shape(self, first: TensorMeta) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return first.shape

    def missing(self, name: str, found: Collection[str]) -> CoverageError:
        """Return the error of half a pair."""
        if "" in found:
            return CoverageError(f"{name} is {dtype_name(QUANTISED)} and has no {name}{SCALE_SUFFIX}")
        return CoverageError(f"{name}{SCALE_SUFFIX} has no {dtype_name(QUANTISED)} {name}")

    def put_together(
        self, name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, Pair]:
        """Return the values in `dtype`, and the pair.  Raises as `fp8_blocks.dequantise`."""
        pair = Pair(parts[""], parts[SCALE_SUFFIX])
        try:
            return dequantise(pair.weight, pair.scale, dtype), pair
        except WeightRequestError as error:
            raise type(error)(f"{name}{SCALE_SUFFIX}: {error}") from None


def refuse_other_fp8(meta: TensorMeta, held: torch.dtype | None) -> None:
    """Raise `DtypeMismatchError` for a kind of FP8 that has no blocks here, where the model holds `held`."""
    is_other = meta.dtype.itemsize == 1 and meta.dtype.is_floating_point and meta.dtype != QUANTISED
    if is_other and held is not None:
        raise DtypeMismatchError(f"{meta.name}: the model has {dtype_name(held)}, got {dtype_name(meta.dtype)}")


def _require_scales(meta: TensorMeta, weight_shape: tuple[int, ...]) -> None:
    if meta.shape != scale_shape(weight_shape):
        raise ShapeMismatchError(
            f"{meta.name} has shape {list(meta.shape)}, expected {list(scale_shape(weight_shape))}"
        )

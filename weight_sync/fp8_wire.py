"""FP8 weights on the wire and in checkpoints: every quantised tensor comes with the tensor of its scales.

    model.layers.0.mlp.experts.3.up_proj.weight             model.layers.0.mlp.experts.gate_up_proj
    model.layers.0.mlp.experts.3.up_proj.weight_scale_inv   model.layers.0.mlp.experts.gate_up_proj_scale_inv

A tensor is one of a pair if its dtype is float8_e4m3fn and the model's is another floating-point type, or if it has the
name of a pair's scales.  Everything else is plain.  Nothing downstream sees a pair: it becomes its values, in the
model's dtype, under the name of its weight (`assembly`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from weight_sync.errors import (
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    UnknownTensorError,
    listed,
)
from weight_sync.fp8_blocks import QUANTISED, SCALE_DTYPES, SCALE_SUFFIX, scale_shape
from weight_sync.tensor_meta import LogicalWeights, TensorMeta, dtype_name

Kind = Literal["plain", "weight", "scale"]


def kind_of(weights: LogicalWeights, meta: TensorMeta) -> Kind:
    """Return the kind of a wire tensor; one that the model does not take, or keeps nothing of, counts as plain."""
    if meta.name.endswith(SCALE_SUFFIX) and meta.name not in weights.metas():
        return "scale" if _has_blocks(weights, weight_name(meta.name)) else "plain"
    is_pair = meta.dtype == QUANTISED and value_dtype(weights, meta) is not None
    return "weight" if is_pair else "plain"


def value_metas(weights: LogicalWeights, metas: Sequence[TensorMeta]) -> list[TensorMeta]:
    """Return the wire tensors of one call as they will be put together: no scales, and quantised weights as their
    values.

    Raises `DtypeMismatchError`, `ShapeMismatchError` for scales and weights that cannot be right.
    """
    found = []
    for meta in metas:
        kind = kind_of(weights, meta)
        if kind == "scale":
            _check_scale(weights, meta)
        elif kind == "weight":
            if len(meta.shape) < 2:
                raise ShapeMismatchError(
                    f"{meta.name} is {dtype_name(meta.dtype)} but not a matrix, so it has no blocks"
                )
            found.append(replace(meta, dtype=value_dtype(weights, meta) or meta.dtype))
        elif _is_other_fp8(meta) and (dtype := value_dtype(weights, meta)) is not None:
            raise DtypeMismatchError(f"{meta.name}: the model has {dtype_name(dtype)}, got {dtype_name(meta.dtype)}")
        else:
            found.append(meta)
    return found


def whole_metas(weights: LogicalWeights, metas: Sequence[TensorMeta]) -> list[TensorMeta]:
    """Return `value_metas` of all tensors of a checkpoint or update.  Raises also `CoverageError` for half a pair."""
    values = value_metas(weights, metas)
    quantised: dict[str, TensorMeta] = {}
    scales: dict[str, TensorMeta] = {}
    for meta in metas:
        if (kind := kind_of(weights, meta)) == "plain":
            continue
        halves, name = (scales, weight_name(meta.name)) if kind == "scale" else (quantised, meta.name)
        if name in halves:
            raise CoverageError(f"{meta.name} came twice")
        halves[name] = meta
    require_pairs(quantised.keys(), scales.keys())
    for name, meta in quantised.items():
        if scales[name].shape != scale_shape(meta.shape):
            raise ShapeMismatchError(
                f"{scales[name].name} has shape {list(scales[name].shape)}, expected {list(scale_shape(meta.shape))}"
            )
    return values


def weight_name(scale_name: str) -> str:
    """Convert `X.weight_scale_inv` to `X.weight`."""
    return scale_name.removesuffix(SCALE_SUFFIX)


def with_other_halves(names: Iterable[str]) -> set[str]:
    """Return these names, and the names of the other halves of pairs, whether there are any or not."""
    found = set(names)
    return found | {f"{name}{SCALE_SUFFIX}" for name in found} | set(map(weight_name, found))


def require_pairs(quantised: Iterable[str], scales: Iterable[str]) -> None:
    """Raise `CoverageError` for a weight of these names without its scales, and for scales without their weight."""
    weights, others = set(quantised), set(scales)
    problems = [f"{name} is {dtype_name(QUANTISED)} and has no {name}{SCALE_SUFFIX}" for name in weights - others]
    problems += [f"{name}{SCALE_SUFFIX} has no {dtype_name(QUANTISED)} {name}" for name in others - weights]
    if problems:
        raise CoverageError(listed(sorted(problems)))


def _is_other_fp8(meta: TensorMeta) -> bool:
    """Return whether the tensor is a kind of FP8 that has no blocks here."""
    return meta.dtype.itemsize == 1 and meta.dtype.is_floating_point and meta.dtype != QUANTISED


def _check_scale(weights: LogicalWeights, meta: TensorMeta) -> None:
    if meta.dtype not in SCALE_DTYPES:
        kinds = ", ".join(map(dtype_name, SCALE_DTYPES))
        raise DtypeMismatchError(f"{meta.name}: scales must be one of {kinds}, got {dtype_name(meta.dtype)}")
    weight = weights.metas().get(weight_name(meta.name))  # a fused one's shape shows when it comes
    if weight is not None and meta.shape != scale_shape(weight.shape):
        raise ShapeMismatchError(
            f"{meta.name} has shape {list(meta.shape)}, expected {list(scale_shape(weight.shape))}"
        )


def value_dtype(weights: LogicalWeights, meta: TensorMeta) -> torch.dtype | None:
    """Return the floating-point type in which the model holds this FP8 tensor; None where it takes it as is, or not."""
    try:
        held = {weights.metas()[piece.name].dtype for piece in weights.split(meta)}
    except (UnknownTensorError, ShapeMismatchError):
        return None
    dtype = held.pop() if len(held) == 1 else meta.dtype
    return dtype if dtype.is_floating_point and dtype != meta.dtype else None


def _has_blocks(weights: LogicalWeights, name: str) -> bool:
    """Return whether the model has a weight of this name, and keeps something of it."""
    if name in weights.metas():
        return True
    try:
        return bool(weights.split(TensorMeta(name, QUANTISED, ())))  # of no tensor's shape
    except ShapeMismatchError:
        return True
    except UnknownTensorError:
        return False

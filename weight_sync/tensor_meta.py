"""Names, dtypes and shapes of logical tensors, and the seam between a model and everything that writes its weights.

A *logical* tensor is one that a checkpoint names (`model.layers.0.mlp.experts.3.gate_proj.weight`), whatever the
engine fuses, shards or replicates it into.  This file does not know any model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorMeta:
    """Name, dtype and shape of a tensor, before or without its data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """One logical tensor inside a tensor that came over the wire: `wire[index]` is the logical tensor `name`.

    Index `()` is the whole; a fused `experts.gate_up_proj` [E, 2I, D] yields 2E pieces such as
    `(3, slice(0, I))` for `experts.3.gate_proj.weight`.
    """

    name: str
    index: tuple[int | slice, ...] = ()


class Place(Protocol):
    """Where one logical tensor lives, whatever the layout of the storage around it.

    Stays valid as long as the storage: addresses never change.
    """

    @property
    def storage(self) -> torch.Tensor:
        """The tensor, or the view of one, that the content lies in."""

    def over(self, storage: torch.Tensor) -> Place:
        """The same place in another tensor, of the dtype, sizes and strides of `storage`."""

    def write(self, source: torch.Tensor) -> None:
        """Take the content of `source`, of the place's logical shape, cast to the storage's dtype."""

    def read(self) -> torch.Tensor:
        """The content, bit for bit; a view where the layout allows, and never to be written to."""


class LogicalWeights(Protocol):
    """What a model offers to whoever loads or refreshes it: cold load and live refresh see nothing else."""

    def metas(self) -> Mapping[str, TensorMeta]:
        """Every logical tensor of the model by canonical name: the full coverage."""

    def split(self, wire: TensorMeta) -> list[Piece]:
        """The logical tensors inside a wire tensor, by any name the model accepts.

        Raises `UnknownTensorError`, `ShapeMismatchError` (never on dtype: the caller decides whether to cast).
        """

    def write(self, name: str, source: torch.Tensor) -> None:
        """Copy logical tensor `name` to every place where it lives under the placement in force.

        Storage addresses do not change.  `source` has the meta's shape; its dtype is cast to the parameter's.
        """

    def read(self, name: str) -> torch.Tensor:
        """The logical tensor as it lives in memory now: a view or a copy, never to be written to."""

    def places(self, name: str) -> Sequence[Place]:
        """Every place of logical tensor `name` under the placement in force, at least one."""

    def recompute_derived(self) -> None:
        """Bring tensors that are computed from weights (none in most models) up to date."""

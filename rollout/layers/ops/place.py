"""`Place`s: where one logical tensor lives in a storage of either layout.

Knows how to write content and to read it back.  Does not know names.
"""

from __future__ import annotations

import torch

from weight_sync.tensor_meta import Place

__all__ = ["PackedPlace", "Place", "ViewPlace"]


class ViewPlace:
    """A part of a tensor that is stored as it is."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    @property
    def storage(self) -> torch.Tensor:
        return self._view

    def over(self, storage: torch.Tensor) -> ViewPlace:
        return ViewPlace(storage)

    def write(self, source: torch.Tensor) -> None:
        self._view.copy_(source)

    def read(self) -> torch.Tensor:
        return self._view


class PackedPlace:
    """Rows of a matrix packed for the compiled operators (`kernels/csrc/packed.h`, `pack.cpp`).

    `step` and `offset` say how blocks of sixteen rows alternate with those of another matrix.
    """

    def __init__(self, packed: torch.Tensor, rows: range, in_features: int, step: int = 1, offset: int = 0) -> None:
        self._packed = packed
        self._rows = rows
        self._in_features = in_features
        self._layout = (step, offset)

    @property
    def storage(self) -> torch.Tensor:
        return self._packed

    def over(self, storage: torch.Tensor) -> PackedPlace:
        return PackedPlace(storage, self._rows, self._in_features, *self._layout)

    def write(self, source: torch.Tensor) -> None:
        assert source.shape == (len(self._rows), self._in_features), source.shape
        source = source.to(device=self._packed.device, dtype=self._packed.dtype)
        torch.ops.lockstep.pack_rows(self._packed, source, self._rows.start, *self._layout)

    def read(self) -> torch.Tensor:
        rows = self._rows
        return torch.ops.lockstep.unpack_rows(self._packed, self._in_features, rows.start, len(rows), *self._layout)

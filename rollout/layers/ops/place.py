"""`Place`: where one logical tensor lives, whatever the layout of the storage around it.

Knows how to write content and to read it back.  Does not know names.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Place(Protocol):
    """Stays valid as long as the storage: addresses never change."""

    def write(self, source: torch.Tensor) -> None:
        """Take the content of `source`, of the place's logical shape, cast to the storage's dtype."""

    def read(self) -> torch.Tensor:
        """The content, bit for bit; a view where the layout allows, and never to be written to."""


class ViewPlace:
    """A part of a tensor that is stored as it is."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

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

    def write(self, source: torch.Tensor) -> None:
        assert source.shape == (len(self._rows), self._in_features), source.shape
        source = source.to(device=self._packed.device, dtype=self._packed.dtype)
        torch.ops.lockstep.pack_rows(self._packed, source, self._rows.start, *self._layout)

    def read(self) -> torch.Tensor:
        rows = self._rows
        return torch.ops.lockstep.unpack_rows(self._packed, self._in_features, rows.start, len(rows), *self._layout)

"""Planes of one tensor, and tables of their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weight_sync.delta.changes import Changes
from weight_sync.delta.planes import SizeTable, read_all_planes, write_all_planes


def size_table(*rows: tuple[int, bool, tuple[int, ...]]) -> SizeTable:
    """Return the table of tensors: changes, whether it is dense, and the bytes of each plane."""
    num_changes, is_dense, counts = zip(*rows, strict=True)
    return SizeTable(np.array(num_changes), np.array(is_dense), np.array(counts))


def write_planes(changes: Changes, numel: int, itemsize: int) -> tuple[SizeTable, list[np.ndarray]]:
    """Return the planes of one tensor, and their sizes."""
    return write_all_planes(changes, np.array([changes.steps_N.size]), np.array([numel]), itemsize)


def read_planes(sizes: SizeTable, planes: Sequence[np.ndarray], numel: int, itemsize: int) -> Changes:
    """Read the planes of one tensor."""
    return read_all_planes(sizes, planes, np.array([numel]), itemsize)

"""`Changes`: where a tensor changed and by how many units in the last place; exact for every dtype.

An element is taken as a word, an integer of the dtype's own width.  A step is the difference of two words, which wraps
around; a step of one is what most elements of a bfloat16 model make in one optimiser step, to the next number away from
zero (+1) or towards it (-1).  Steps are differences, so the steps of the way back are the same ones negated.

N changed elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_sync.errors import ContentError, DtypeMismatchError, ShapeMismatchError
from weight_sync.fingerprint import fingerprint_update
from weight_sync.fingerprint_words import words_of
from weight_sync.tensor_meta import Region, dtype_name


@dataclass(frozen=True)
class Changes:
    """`positions_N`: flat indices, int64, ascending.  `steps_N`: differences of words, int64, none of them zero."""

    positions_N: np.ndarray
    steps_N: np.ndarray

    def within(self, shape: Sequence[int], region: Region | None) -> tuple[Changes, np.ndarray]:
        """Return the changes inside a part of a tensor of `shape`, by flat index in the part; and their flat indices in
        the whole."""
        if region is None:
            return self, self.positions_N
        inner = math.prod(shape[region.dim + 1 :])
        rows_N, columns_N = np.divmod(self.positions_N, inner)
        outer_N, at_N = np.divmod(rows_N, shape[region.dim])
        mine, local_N = np.zeros(at_N.shape, dtype=bool), at_N.copy()
        for run in region.runs():
            here, there = run.in_whole[-1], run.in_part[-1]
            inside = (at_N >= here.start) & (at_N < here.stop)
            mine |= inside
            local_N[inside] += there.start - here.start
        local_N = (outer_N * region.length + local_N) * inner + columns_N
        return Changes(local_N[mine], self.steps_N[mine]), self.positions_N[mine]


def find_changes(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """Return the changes from `old` to `new`, of one dtype and shape, on one device; row-major flat indices.

    Raises `DtypeMismatchError`, `ShapeMismatchError`.
    """
    if old.dtype != new.dtype:
        raise DtypeMismatchError(f"a delta needs one dtype, got {dtype_name(old.dtype)} and {dtype_name(new.dtype)}")
    if old.shape != new.shape:
        raise ShapeMismatchError(f"a delta needs one shape, got {list(old.shape)} and {list(new.shape)}")
    before, after = words_of(old), words_of(new)
    positions = torch.nonzero(before != after).view(-1)
    steps = (after[positions] - before[positions]).to(torch.int64)
    return Changes(positions.cpu().numpy(), steps.cpu().numpy())


def apply_changes(base: torch.Tensor, changes: Changes, base_fingerprint: int) -> tuple[torch.Tensor, int]:
    """Return a new tensor on the device of `base`, and its fingerprint, updated from that of `base`.

    Raises `ContentError` for a position outside of the tensor.
    """
    return changed(base, changes), share_after(base, changes, changes.positions_N, base_fingerprint)


def changed(base: torch.Tensor, changes: Changes) -> torch.Tensor:
    """Return a new tensor, or part of one, on the device of `base`.  Raises `ContentError` for a position outside of
    it.
    """
    words = words_of(base).clone()
    positions, _, after = _words_at(words, changes)
    words[positions] = after
    return words.view(base.dtype).view(base.shape)


def share_after(base: torch.Tensor, changes: Changes, indices_N: np.ndarray, share: int) -> int:
    """Return what `changed` will contribute to its tensor's fingerprint, where `base` contributes `share`.

    `indices_N`: the flat indices of the changes in the whole tensor.  Raises as `changed`.
    """
    positions, before, after = _words_at(words_of(base), changes)
    return fingerprint_update(share, torch.from_numpy(indices_N).to(positions.device), before, after)


def _words_at(words: torch.Tensor, changes: Changes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the positions that change, and the words there before and after."""
    if changes.positions_N.size and int(changes.positions_N[-1]) >= words.numel():
        raise ContentError(f"position {int(changes.positions_N[-1])} is outside a tensor of {words.numel()} elements")
    positions = torch.from_numpy(changes.positions_N).to(words.device)
    before = words[positions]
    return positions, before, before + torch.from_numpy(changes.steps_N).to(words.device, words.dtype)

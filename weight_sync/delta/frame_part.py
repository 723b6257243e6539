"""`FramePart`: tensors of a frame that are changed together, in one run of bytes.

    held content, tensor by tensor -> end to end -> fingerprints -> changed in place -> fingerprints again, a bucket

Only reading what is held takes a step for each tensor.

T tensors, N changed elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from weight_sync.delta.changes import Changes
from weight_sync.delta.frame import TensorDelta
from weight_sync.delta.planes import read_all_planes
from weight_sync.errors import ContentError
from weight_sync.fingerprint_words import SIGNED
from weight_sync.moves import matrix_of
from weight_sync.spans import DTYPE_CODES, MOVE_COLUMNS, SpanTensor
from weight_sync.stored_tensors import PART_BYTES
from weight_sync.take_spans import SpanTables
from weight_sync.tensor_meta import BucketLayout, PackedBucket, TensorMeta


class PartTables(NamedTuple):
    """Tensors of one item size, end to end; `tables`: by which `take_spans` reads them."""

    layout: BucketLayout
    tables: SpanTables

    @property
    def itemsize(self) -> int:
        return self.layout.metas[0].dtype.itemsize

    @classmethod
    def of(cls, metas: Sequence[TensorMeta]) -> PartTables:
        *offsets, num_bytes = itertools.accumulate((meta.nbytes for meta in metas), initial=0)
        rows = []
        for meta, offset in zip(metas, offsets, strict=True):
            code, (num_rows, num_columns) = DTYPE_CODES[meta.dtype], matrix_of(meta.shape)
            rows.append(SpanTensor.whole(offset, code, code, num_rows, num_columns, num_columns, 1))
        moves = torch.empty(0, MOVE_COLUMNS, dtype=torch.int64)
        return cls(BucketLayout(metas, offsets, num_bytes), SpanTables(torch.tensor(rows), moves))


def cut_parts(metas: Sequence[TensorMeta]) -> list[PartTables]:
    """Cut tensors, in order, into parts of one item size and at most `PART_BYTES`, or one tensor."""
    runs: list[list[TensorMeta]] = []
    filled = 0
    for meta in metas:
        fits = runs and runs[-1][0].dtype.itemsize == meta.dtype.itemsize and filled + meta.nbytes <= PART_BYTES
        if not fits:
            runs.append([])
            filled = 0
        runs[-1].append(meta)
        filled += meta.nbytes
    return [PartTables.of(run) for run in runs]


class FramePart:
    """The deltas of the tensors of `tables`, in its order."""

    def __init__(self, tables: PartTables, deltas: Sequence[TensorDelta]) -> None:
        self._tables = tables
        self._deltas = deltas

    @property
    def names(self) -> list[str]:
        return [meta.name for meta in self._tables.layout.metas]

    def prove(self, held: Sequence[torch.Tensor]) -> tuple[PackedBucket, np.ndarray]:
        """Return what `changed` does, and F of each tensor before and after: uint64 [T, 2]."""
        content = self._end_to_end(held)
        before_T = self._fingerprints(content)
        self._change(content)
        return PackedBucket(self._tables.layout, content), np.stack([before_T, self._fingerprints(content)], 1)

    def changed(self, held: Sequence[torch.Tensor]) -> PackedBucket:
        """Return the changed tensors.  `held`: what each of them is now.  Raises `ContentError`."""
        content = self._end_to_end(held)
        self._change(content)
        return PackedBucket(self._tables.layout, content)

    def _end_to_end(self, held: Sequence[torch.Tensor]) -> torch.Tensor:
        signed = SIGNED[self._tables.itemsize]
        return torch.cat([content.detach().reshape(-1).view(signed) for content in held]).view(torch.uint8)

    def _fingerprints(self, content: torch.Tensor) -> np.ndarray:
        sums, _ = self._tables.tables.take(content, [], writes=False)
        return sums[:, 0].cpu().numpy().view(np.uint64)

    def _change(self, content: torch.Tensor) -> None:
        changes, words = self._changes(), content.view(SIGNED[self._tables.itemsize])
        starts_T = np.array(self._tables.layout.offsets, dtype=np.int64) // self._tables.itemsize
        starts_N = np.repeat(starts_T, [delta.entry.sizes.num_changes for delta in self._deltas])
        positions = torch.from_numpy(starts_N + changes.positions_N).to(words.device)
        words[positions] += torch.from_numpy(changes.steps_N).to(words.device, words.dtype)

    def _changes(self) -> Changes:
        """Return the changes of all tensors, end to end; positions are counted in each."""
        sizes = [delta.entry.sizes for delta in self._deltas]
        numels = [meta.numel for meta in self._tables.layout.metas]
        planes = [np.concatenate(parts) for parts in zip(*(delta.planes for delta in self._deltas), strict=True)]
        try:
            return read_all_planes(sizes, planes, numels, self._tables.itemsize)
        except ContentError:
            for delta in self._deltas:
                delta.changes()  # raises for the tensor that is wrong
            raise

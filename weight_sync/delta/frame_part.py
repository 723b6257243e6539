"""`FramePart`: tensors of a frame that are changed together, in one run of bytes.

    held content, tensor by tensor -> end to end -> fingerprints -> changed in place -> fingerprints again, a bucket

Where there is a compiled kernel (`change_spans`) it does all of this by tables.  Elsewhere reading what is held takes a
step for each tensor.

T tensors, N changed elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weight_sync.bucket import runs_of
from weight_sync.delta.change_spans import SpanChange
from weight_sync.delta.changes import Changes
from weight_sync.delta.frame import cut_planes
from weight_sync.delta.planes import SizeTable, read_all_planes
from weight_sync.errors import ContentError
from weight_sync.fingerprint_words import SIGNED
from weight_sync.homes import address_of, bytes_of
from weight_sync.moves import Move, matrix_of
from weight_sync.spans import DTYPE_CODES, MOVE_COLUMNS, TENSOR_COLUMNS, SpanMove, SpanTensor, table_of
from weight_sync.take_spans import SpanTables
from weight_sync.tensor_meta import BucketLayout, PackedBucket, TensorMeta

PART_BYTES = 4 << 20
"""The bytes of a part: it is read, summed, changed and summed again before it leaves the caches."""


class PartTables(NamedTuple):
    """Tensors of one item size, end to end; `tables`: by which `take_spans` reads them.

    `moves`: to where they live, in `storages`, of each of which there is a tensor; none without `change_spans`.
    """

    layout: BucketLayout
    tables: SpanTables
    moves: torch.Tensor
    storages: Sequence[torch.Tensor]

    @property
    def itemsize(self) -> int:
        return self.layout.metas[0].dtype.itemsize

    @classmethod
    def of(cls, metas: Sequence[TensorMeta], moves_of: Callable[[str], Sequence[Move]] | None = None) -> PartTables:
        """Return the tables of some tensors.  `moves_of`: to where one lives; None: without `change_spans`."""
        *offsets, num_bytes = itertools.accumulate((meta.nbytes for meta in metas), initial=0)
        rows, moves, storages, numbers = [], [], dict[int, torch.Tensor](), dict[int, int]()
        for at, (meta, offset) in enumerate(zip(metas, offsets, strict=True)):
            code, (num_rows, num_columns) = DTYPE_CODES[meta.dtype], matrix_of(meta.shape)
            rows.append(SpanTensor.whole(offset, code, code, num_rows, num_columns, num_columns, 1))
            for move in () if moves_of is None else moves_of(meta.name):
                key = address_of(move.storage)
                storages.setdefault(key, move.storage)
                moves.append(SpanMove.of(move, at, numbers.setdefault(key, len(numbers))))
        tables = SpanTables(table_of(rows, TENSOR_COLUMNS), table_of((), MOVE_COLUMNS))
        layout = BucketLayout(metas, offsets, num_bytes)
        return cls(layout, tables, table_of(moves, MOVE_COLUMNS), list(storages.values()))


def cut_parts(metas: Sequence[TensorMeta], moves_of: Callable[[str], Sequence[Move]] | None = None) -> list[PartTables]:
    """Cut tensors, in order, into parts of one item size and at most `PART_BYTES`, or one tensor."""
    same_width = (run for _, run in itertools.groupby(metas, lambda meta: meta.dtype.itemsize))
    return [PartTables.of(run, moves_of) for some in same_width for run in runs_of(some, PART_BYTES)]


class FramePart:
    """The changes of the tensors of `tables`, in its order.

    `planes`: of all of them, end to end.  `numels`: their elements, int64 [T].  `held`: returns what a tensor is now.
    `room`: uint8, large enough for the content of each part of a frame; it is the next part's, too.
    """

    def __init__(
        self,
        tables: PartTables,
        sizes: SizeTable,
        planes: Sequence[np.ndarray],
        numels: np.ndarray,
        held: Callable[[str], torch.Tensor],
        room: torch.Tensor,
    ) -> None:
        self._tables, self._held, self._room = tables, held, room
        self._sizes, self._planes, self._numels = sizes, planes, numels

    def prove(self) -> tuple[PackedBucket, np.ndarray]:
        """Return what `changed` does, and F of each tensor before and after: uint64 [T, 2]."""
        content = self._end_to_end()
        before_T = self._fingerprints(content)
        self._change(content)
        return PackedBucket(self._tables.layout, content), np.stack([before_T, self._fingerprints(content)], 1)

    def changed(self) -> PackedBucket:
        """Return the changed tensors.  Raises `ContentError`."""
        content = self._end_to_end()
        self._change(content)
        return PackedBucket(self._tables.layout, content)

    def _end_to_end(self) -> torch.Tensor:
        """Return what is held, end to end."""
        if self._tables.storages:
            content = self._room[: self._tables.layout.num_bytes]
            self._compiled(content).read(self._tables.moves, list(map(bytes_of, self._tables.storages)))
            return content
        signed = SIGNED[self._tables.itemsize]
        held = [self._held(meta.name) for meta in self._tables.layout.metas]
        return torch.cat([content.detach().reshape(-1).view(signed) for content in held]).view(torch.uint8)

    def _compiled(self, content: torch.Tensor) -> SpanChange:
        return SpanChange(content, self._tables.tables.tensors, self._sizes, self._planes)

    def _fingerprints(self, content: torch.Tensor) -> np.ndarray:
        sums, _ = self._tables.tables.take(content, [], writes=False)
        return sums[:, 0].cpu().numpy().view(np.uint64)

    def _change(self, content: torch.Tensor) -> None:
        if self._tables.storages:
            if not self._compiled(content).apply():
                raise self._error()
            return
        changes, words = self._changes(), content.view(SIGNED[self._tables.itemsize])
        starts_T = np.array(self._tables.layout.offsets, dtype=np.int64) // self._tables.itemsize
        starts_N = np.repeat(starts_T, self._sizes.num_changes)
        positions = torch.from_numpy(starts_N + changes.positions_N).to(words.device)
        words[positions] += torch.from_numpy(changes.steps_N).to(words.device, words.dtype)

    def _changes(self) -> Changes:
        """Return the changes of all tensors, end to end; positions are counted in each."""
        try:
            return read_all_planes(self._sizes, self._planes, self._numels, self._tables.itemsize)
        except ContentError:
            raise self._error() from None

    def _error(self) -> ContentError:
        """Return the error of the first tensor that is wrong."""
        parts = cut_planes(self._sizes, self._planes)
        for at, (meta, planes) in enumerate(zip(self._tables.layout.metas, parts, strict=True)):
            try:
                one, numel = self._sizes.some(slice(at, at + 1)), np.array([meta.numel])
                read_all_planes(one, planes, numel, self._tables.itemsize)
            except ContentError as error:
                return ContentError(f"{meta.name}: {error}")
        return ContentError("the planes of a delta contradict each other")

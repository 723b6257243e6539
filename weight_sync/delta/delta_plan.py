"""`DeltaPlan`: what becomes of the tensors of a frame, worked out once for the same list of tensors.

Tensors that lie whole on this rank are changed many at a time (`FramePart`), and taken by plan.  Copies of one are
compared with the first.  Tensors that are split are changed one by one.

T tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_sync.delta.change_spans import is_compiled
from weight_sync.delta.frame import DeltaFrame, TensorDelta, cut_planes
from weight_sync.delta.frame_part import FramePart, PartTables, cut_parts
from weight_sync.delta.tensor_list import TensorList
from weight_sync.digest_plan import DigestPlan
from weight_sync.errors import BaseMismatchError
from weight_sync.homes import Homes
from weight_sync.moves import ROW_KINDS, Move
from weight_sync.tensor_meta import LogicalWeights


@dataclass(frozen=True, eq=False)
class DeltaPlan:
    """`held`: tensors of which the model has something; `planned`: the ones in `parts`; bool [T] each.

    `copied`: numbers of planned tensors with several places.  `digests`: of the whole version, where the frame has it.
    """

    held: np.ndarray
    planned: np.ndarray
    copied: Sequence[int]
    parts: Sequence[PartTables]
    digests: DigestPlan | None

    @classmethod
    def of(cls, tensors: TensorList, weights: LogicalWeights, homes: Homes) -> DeltaPlan:
        """Return the plan of tensors that were checked against the model."""
        metas, names = weights.metas(), tensors.names
        held = np.array([name in metas for name in names], dtype=np.bool_)
        by_tables = is_compiled() and homes.device is not None and homes.device.type == "cpu"
        moves: dict[str, Sequence[Move]] = {}
        planned, copied = held.copy(), []
        for at in np.flatnonzero(held).tolist():
            places = homes.places(names[at])
            planned[at] = len(places) > 0 and all(place.region is None for place in places)
            if by_tables and planned[at]:
                found = places[0].moves(tensors.metas[at].shape)
                planned[at] = found is not None and not any(move.kind in ROW_KINDS for move in found)
                moves[names[at]] = found or ()
            if planned[at] and len(places) > 1:
                copied.append(at)
        chosen = [tensors.metas[at] for at in np.flatnonzero(planned).tolist()]
        parts = cut_parts(chosen, moves.__getitem__ if by_tables else None)
        is_whole = bool(names) and len(metas) == np.count_nonzero(held)
        return cls(held, planned, copied, parts, DigestPlan(tensors.metas) if is_whole else None)

    @property
    def single(self) -> np.ndarray:
        """Tensors that are changed one by one, bool [T]."""
        found: np.ndarray = self.held & ~self.planned
        return found

    @property
    def _room_bytes(self) -> int:
        """The bytes of the largest part that is read by tables."""
        return max((part.layout.num_bytes for part in self.parts if part.storages), default=0)

    def require_digests(self, frame: DeltaFrame) -> None:
        """Raise `BaseMismatchError` where fingerprints of a whole version are others than its digest states."""
        if self.digests is None:
            return
        for stated, values in zip((frame.base_digest, frame.digest), frame.fingerprints.T, strict=True):
            if self.digests.digest(values) != stated:
                raise BaseMismatchError(f"the delta's fingerprints do not add up to its digest {stated}")

    def open(self, frame: DeltaFrame, held: Callable[[str], torch.Tensor]) -> tuple[list[FramePart], list[TensorDelta]]:
        """Return the changes of the planned tensors, and of the single ones.  Raises `ContentError`.

        `held`: returns what a planned tensor is now.
        """
        together, apart = frame.chosen_planes([self.planned, self.single])
        of_single = cut_planes(frame.sizes.some(self.single), apart)
        numbers = np.flatnonzero(self.single).tolist()
        singles = [TensorDelta(frame.entry(at), planes) for at, planes in zip(numbers, of_single, strict=True)]
        return list(self._cut(frame, together, held)), singles

    def _cut(
        self, frame: DeltaFrame, planes: Sequence[np.ndarray], held: Callable[[str], torch.Tensor]
    ) -> Iterator[FramePart]:
        sizes, numels = frame.sizes.some(self.planned), frame.tensors.numels[self.planned]
        room = torch.empty(self._room_bytes, dtype=torch.uint8)
        first, starts = 0, [0] * len(planes)
        for part in self.parts:
            some = slice(first, first + len(part.layout.metas))
            mine = sizes.some(some)
            stops = [start + count for start, count in zip(starts, mine.counts.sum(0).tolist(), strict=True)]
            cut = [plane[start:stop] for plane, start, stop in zip(planes, starts, stops, strict=True)]
            yield FramePart(part, mine, cut, numels[some], held, room)
            first, starts = some.stop, stops

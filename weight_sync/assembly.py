"""`Assembly`: wire tensors that come in boxes and are put together before anything is made of them.

So come tensors that are converted as a whole (halves of FP8 pairs, weights that an engine quantises), and all tensors
where no plan is replayed (`plan`).  Memory: one copy of each such tensor, from its first box until its last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from weight_sync.boxes import Box, box_text, first_gap, index_of, overlapping
from weight_sync.errors import CoverageError, DtypeMismatchError, listed
from weight_sync.tensor_meta import TensorMeta, dtype_name


@dataclass
class _Waiting:
    content: torch.Tensor
    boxes: list[Box] = field(default_factory=list)
    missing: int = 0


class Assembly:
    """The boxes of one refresh whose tensors are not whole yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._whole: set[str] = set()

    def take(self, sent: Iterable[tuple[TensorMeta, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Take tensors and boxes, which stay the caller's; return what is whole now.

        Raises `CoverageError` for boxes that overlap, `DtypeMismatchError` for boxes of one tensor in two dtypes.
        """
        whole = []
        for meta, content in sent:
            if meta.box is None and meta.name not in self._waiting:
                whole.append((meta.name, content))
                continue
            waiting = self._waiting.get(meta.name)
            if waiting is None:
                if meta.name in self._whole:
                    raise CoverageError(f"{meta.name} came twice: a box of it comes after all of it")
                area = torch.empty(meta.shape, dtype=meta.dtype, device=content.device)
                waiting = self._waiting[meta.name] = _Waiting(area, missing=area.numel())
            self._add(waiting, meta, content)
            if not waiting.missing:
                del self._waiting[meta.name]
                self._whole.add(meta.name)
                whole.append((meta.name, waiting.content))
        return whole

    def settle(self) -> None:
        """Raise `CoverageError` for tensors of which a box is missing."""
        found = [
            f"{name} lacks {box_text(first_gap(waiting.content.shape, waiting.boxes) or ())}"
            for name, waiting in sorted(self._waiting.items())
        ]
        if found:
            raise CoverageError(f"{len(found)} tensors came in part: {listed(found)}")

    def clear(self) -> None:
        """Release what waits."""
        self._waiting.clear()

    @staticmethod
    def _add(waiting: _Waiting, meta: TensorMeta, content: torch.Tensor) -> None:
        area = waiting.content
        if meta.dtype != area.dtype:
            raise DtypeMismatchError(
                f"{meta.name}: its boxes come as {dtype_name(area.dtype)} and {dtype_name(meta.dtype)}"
            )
        box = meta.box or tuple((0, size) for size in meta.shape)
        both = next((met for other in waiting.boxes if (met := overlapping([other, box]))), None)
        if both is not None:
            raise CoverageError(f"{meta.name}: the boxes {box_text(both[0])} and {box_text(both[1])} overlap")
        area[index_of(box)] = content
        waiting.boxes.append(box)
        waiting.missing -= content.numel()

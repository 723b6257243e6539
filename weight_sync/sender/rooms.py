"""Buckets on their way out: `Rooms`, the memory that they are packed in, and `Ahead`, pieces that are packed early."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch


class Rooms:
    """Memory for two buckets, which take turns; kept from refresh to refresh."""

    def __init__(self) -> None:
        self._areas: dict[int, torch.Tensor] = {}

    def take(self, position: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return room for the bucket at this position of a refresh, uint8 [num_bytes]."""
        turn = position % 2
        area = self._areas.get(turn)
        if area is None or area.numel() < num_bytes or area.device != device:
            area = self._areas[turn] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return area[:num_bytes]

    def clear(self) -> None:
        """Let go of the memory, as a broadcast that was given up may still read it."""
        self._areas.clear()


class Ahead(Iterator[torch.Tensor]):
    """The pieces of a bucket, in their order, of which some may be packed before they are asked for."""

    def __init__(self, pieces: Iterable[torch.Tensor]) -> None:
        self._pieces = iter(pieces)
        self._packed: deque[torch.Tensor] = deque()

    def pack_one(self) -> bool:
        """Pack one more piece; return whether there was one left.  Raises what packing raises."""
        piece = next(self._pieces, None)
        if piece is not None:
            self._packed.append(piece)
        return piece is not None

    def __next__(self) -> torch.Tensor:
        return self._packed.popleft() if self._packed else next(self._pieces)

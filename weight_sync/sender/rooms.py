"""Buckets on their way out: `Rooms`, the memory that they are packed in, and `Ahead`, pieces that are packed early."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from weight_sync.bucket import copy_into
from weight_sync.sealed_memory import MemoryAddress, SealedMemory


@dataclass(frozen=True)
class Room:
    """Room for one bucket, uint8 [num_bytes].  `memory`: it is the beginning of this, which engines may map."""

    content: torch.Tensor
    memory: SealedMemory | None = None

    @property
    def address(self) -> MemoryAddress | None:
        return None if self.memory is None else self.memory.address

    def held(self, pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the pieces; in memory that engines may map each lies after the one before, copied there if need be."""
        if self.memory is None:
            yield from pieces
            return
        start = 0
        for piece in pieces:
            place = self.content[start : start + piece.numel()]
            if piece.data_ptr() != place.data_ptr():
                copy_into(place, piece)
            yield place
            start += piece.numel()


class Rooms:
    """Memory for two buckets, which take turns; kept from refresh to refresh."""

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = {}

    def take(self, position: int, num_bytes: int, device: torch.device, *, shared: bool = False) -> Room:
        """Return room for the bucket at this position of a refresh.  `shared`: in memory that engines may map.

        Raises `TransportError` where there is no such memory.
        """
        turn = position % 2
        room = self._rooms.get(turn)
        fits = room is not None and room.content.numel() >= num_bytes and room.content.device == device
        if room is None or not fits or (room.memory is not None) != shared:
            self._rooms.pop(turn, None)  # so that there are never three
            room = self._rooms[turn] = _new_room(num_bytes, device, shared=shared)
        return Room(room.content[:num_bytes], room.memory)

    def clear(self) -> None:
        """Let go of the memory, as a broadcast that was given up may still read it."""
        self._rooms.clear()


def _new_room(num_bytes: int, device: torch.device, *, shared: bool) -> Room:
    if not shared:
        return Room(torch.empty(num_bytes, dtype=torch.uint8, device=device))
    assert device.type == "cpu", "memory of a device is not mapped"
    memory = SealedMemory(max(num_bytes, 1))
    return Room(memory.content, memory)


class Ahead(Iterator[torch.Tensor]):
    """The pieces of a bucket, in their order, of which some may be packed before they are asked for."""

    def __init__(self, pieces: Iterable[torch.Tensor]) -> None:
        self._pieces = iter(pieces)
        self._packed: deque[torch.Tensor] = deque()
        self.num_bytes = 0
        """The bytes that were packed early, so far."""

    def pack_one(self) -> bool:
        """Pack one more piece; return whether there was one left.  Raises what packing raises."""
        piece = next(self._pieces, None)
        if piece is not None:
            self._packed.append(piece)
            self.num_bytes += piece.numel()
        return piece is not None

    def __next__(self) -> torch.Tensor:
        return self._packed.popleft() if self._packed else next(self._pieces)

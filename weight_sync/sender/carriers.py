"""Carriers of pieces: the ways by which a bucket reaches the engines of a group, chosen once when they join.

Broadcasts    each piece is broadcast to all of them
RankPieces    each piece goes to one rank, in a group of two
Notices       pieces lie in memory that the engines map; a notice of each is broadcast, unless it was there before the
              bucket was announced
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle
from weight_sync.receivers.memory import notice_of
from weight_sync.sealed_memory import MemoryAddress, SealedToken
from weight_sync.sender.rank_groups import RankGroups, RankPiece

Transport = Literal["auto", "broadcast", "shared_memory"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "broadcast", "shared_memory")
IN_MEMORY = "shared memory"


class Carrier(Protocol):
    """`reads_memory`: pieces must lie in the memory of their bucket, end to end."""

    reads_memory: bool

    def fields(self, memory: MemoryAddress | None, filled: int) -> dict[str, Any]:
        """Return what the call that announces a bucket has because of this.  `filled`: the bytes that lie there."""

    def start(self, piece: Any, start: int, memory: MemoryAddress | None, timeout_s: float) -> dist.Work:
        """Start to send a piece, from byte `start` of its bucket on, which lies in `memory` unless that is None.

        Raises as `GroupHandle.start_broadcast`.
        """


class Broadcasts:
    """Broadcasts to all ranks of a group."""

    reads_memory = False

    def __init__(self, handle: GroupHandle) -> None:
        self._handle = handle

    def fields(self, memory: MemoryAddress | None, filled: int) -> dict[str, Any]:
        return {}

    def start(self, piece: torch.Tensor, start: int, memory: MemoryAddress | None, timeout_s: float) -> dist.Work:
        return self._handle.start_broadcast(piece, timeout_s)


class RankPieces:
    """Broadcasts in groups of two."""

    reads_memory = False

    def __init__(self, handle: RankGroups) -> None:
        self._handle = handle

    def fields(self, memory: MemoryAddress | None, filled: int) -> dict[str, Any]:
        return {}

    def start(self, piece: RankPiece, start: int, memory: MemoryAddress | None, timeout_s: float) -> dist.Work:
        return self._handle.start_broadcast(piece, timeout_s)


class Notices:
    """Notices to all ranks of a group, which read the pieces where they lie."""

    reads_memory = True

    def __init__(self, handle: GroupHandle) -> None:
        self._handle = handle

    def fields(self, memory: MemoryAddress | None, filled: int) -> dict[str, Any]:
        assert memory is not None, "the pieces lie in memory"
        return {"memory": memory._asdict() | {"filled": filled}}

    def start(self, piece: torch.Tensor, start: int, memory: MemoryAddress | None, timeout_s: float) -> dist.Work:
        assert memory is not None, "the pieces lie in memory"
        return self._handle.start_broadcast(notice_of(memory, start, piece.numel()), timeout_s)


def carrier_of(handle: GroupHandle | RankGroups, *, reads_memory: bool = False) -> Carrier:
    """Return what carries pieces over a group, or over a group with each rank."""
    if isinstance(handle, RankGroups):
        return RankPieces(handle)
    return Notices(handle) if reads_memory else Broadcasts(handle)


class MemoryOffer:
    """The offer to engines that join to read this process's memory.  `lacks`: why none is made."""

    def __init__(self, transport: Transport, lacks: str | None) -> None:
        self._token: SealedToken | None = None
        self.lacks = "it was asked for" if transport == "broadcast" else lacks
        if self.lacks is None:
            try:
                self._token = SealedToken()
            except TransportError as error:
                self.lacks = str(error)

    @property
    def fields(self) -> dict[str, Any]:
        """Return what a call to join has because of it."""
        return {} if self._token is None else {"memory": self._token.address._asdict()}

    def refused(self, call: Future[Any]) -> str | None:
        """Return why the engine that has joined by this call reads no memory; None if it does."""
        if self._token is None:
            return self.lacks
        answer = call.result()
        answer = answer if isinstance(answer, Mapping) else {}
        if answer.get("memory_token") == self._token.text:
            return None
        return str(answer.get("memory_refused") or "the engine does not say that it can")

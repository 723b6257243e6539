"""`RankGroups`: a group of two with each rank of an engine, so that each is sent tensors of its own.

To a bucket on its way they are one group, whose pieces each have a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weight_sync.process_group import GroupHandle, free_port, init_process_group
from weight_sync.rank_boxes import RankBoxes
from weight_sync.sender.lists import TensorLists
from weight_sync.update_groups import pair_name
from weight_sync.waiting import Patience


class RankPiece(NamedTuple):
    """A broadcast to one rank of an engine: `content`, uint8."""

    rank: int
    content: torch.Tensor

    def numel(self) -> int:
        """Return the number of bytes."""
        return self.content.numel()


@dataclass
class EngineRanks:
    """The parts that an engine's ranks keep, as it stated last: `boxes`, under the expert map of `placement_epoch`.

    `asked_for`: the lists of tensors that it was asked about; None: it was not asked yet.
    """

    asked_for: TensorLists | None = None
    boxes: RankBoxes = field(default_factory=lambda: RankBoxes([], []))
    placement_epoch: int = 0

    @property
    def begin_fields(self) -> dict[str, Any]:
        """The fields of a begin that hold the engine to it."""
        return {"per_rank": True, "placement_epoch": self.placement_epoch}


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now.  Raises as `free_port`."""
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)


class RankGroups:
    """`groups`: by rank.  `name`: by which the engine knows them all."""

    def __init__(self, name: str, groups: Sequence[GroupHandle]) -> None:
        self.name = name
        self._groups = groups
        self._group_of: dict[int, GroupHandle] = {}  # by the id of a broadcast that is not finished

    @classmethod
    def join(
        cls, address: str, ports: Sequence[int], name: str, backend: str, timeout_s: float, patience: Patience
    ) -> RankGroups:
        """Join a group with each rank, at its port.  Raises as `init_process_group`; the groups joined are left."""
        groups: list[GroupHandle] = []
        try:
            for rank, port in enumerate(ports):
                groups.append(
                    init_process_group(address, port, 0, 2, pair_name(name, rank), backend, timeout_s, patience)
                )
        except BaseException:
            for group in groups:
                group.destroy()
            raise
        return cls(name, groups)

    @property
    def num_ranks(self) -> int:
        return len(self._groups)

    @property
    def broken(self) -> bool:
        """True if one of them can only be left."""
        return any(group.broken for group in self._groups)

    @broken.setter
    def broken(self, value: bool) -> None:
        for group in self._groups:
            group.broken = value

    def end_connecting(self, reason: str) -> None:
        """Cancel waits as `GroupHandle.end_connecting`.  On any thread."""
        for group in self._groups:
            group.end_connecting(reason)

    def start_broadcast(self, piece: RankPiece, timeout_s: float) -> dist.Work:
        """Start sending a piece to its rank.  Raises as `GroupHandle.start_broadcast`."""
        group = self._groups[piece.rank]
        work = group.start_broadcast(piece.content, timeout_s)
        self._group_of[id(work)] = group
        return work

    def finish(self, work: dist.Work, deadline: float) -> None:
        """Wait for a broadcast.  Raises as `GroupHandle.finish`."""
        self._group_of.pop(id(work)).finish(work, deadline)

    def destroy(self) -> None:
        """Leave all of them."""
        self._group_of.clear()
        for group in self._groups:
            group.destroy()

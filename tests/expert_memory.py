"""Expert slots in plain memory, all different, with faults at any read and write; and ranks that move them.

Shapes: L MoE layers, P physical experts (slots over all ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eplb.errors import EplbError
from eplb.migration import Migration
from eplb.transfer import ExpertSlots, ExpertTransfer, RankGroup
from weight_sync.fingerprint import fingerprint

PART_BYTES = (96, 33)
SLOT_BYTES = sum(PART_BYTES)


class PlantedError(Exception):
    """A fault of a test."""


@dataclass
class Fault:
    """A fault on `rank`, at call number `at` of `kind`.

    read, write, empty, fingerprint    raises
    flip_write, flip_receive           one bit comes out wrong, in silence
    writes_from                        this write and every later one raises
    late                               the clock jumps ahead
    """

    kind: str = "none"
    rank: int = 0
    at: int = 0


@dataclass
class Calls:
    """The number of calls of everything, and the planted fault."""

    rank: int
    fault: Fault = field(default_factory=Fault)
    counts: dict[str, int] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """Count a call of `name` and return its number, from 0."""
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name] - 1

    def is_due(self, kind: str, number: int) -> bool:
        """Return whether the fault is of this kind and at this call."""
        return (self.fault.kind, self.fault.rank, self.fault.at) == (kind, self.rank, number)

    def may_fail(self, name: str) -> None:
        if self.is_due(name, self.number(name)):
            raise PlantedError(name)


def content_of(layer: int, logical_expert: int) -> list[torch.Tensor]:
    """Return the content that every slot with this expert must hold."""
    generator = torch.Generator().manual_seed(1000 * layer + logical_expert)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in PART_BYTES]


class MemorySlots:
    """The slots of one rank, filled as in the map."""

    form = "bytes"
    part_bytes: Sequence[int] = PART_BYTES

    def __init__(self, map_LP: np.ndarray, ep_rank: int, num_ranks: int, calls: Calls) -> None:
        self.slots_per_rank = map_LP.shape[1] // num_ranks
        self._first = ep_rank * self.slots_per_rank
        self._calls = calls
        own = map_LP[:, self._first : self._first + self.slots_per_rank].tolist()
        self.held = [[content_of(layer, expert) for expert in row] for layer, row in enumerate(own)]

    def read(self, layer: int, slot: int) -> Sequence[torch.Tensor]:
        self._calls.may_fail("read")
        return self.held[layer][slot]

    def write(self, layer: int, slot: int, content: Sequence[torch.Tensor]) -> None:
        calls, number = self._calls, self._calls.number("write")
        held = self.held[layer][slot]
        if calls.is_due("write", number):
            held[0].copy_(content[0])  # half of it
            raise PlantedError("write")
        if calls.fault.kind == "writes_from" and calls.fault.rank == calls.rank and number >= calls.fault.at:
            raise PlantedError("write")
        for to, new in zip(held, content, strict=True):
            to.copy_(new)
        if calls.is_due("flip_write", number):
            held[-1][3] ^= 4

    def empty(self, num_bytes: int) -> torch.Tensor:
        self._calls.may_fail("empty")
        return torch.empty(num_bytes, dtype=torch.uint8)

    def wrong_slots(self, map_LP: np.ndarray) -> list[str]:
        """List the slots that do not hold the expert that the map names."""
        own = map_LP[:, self._first : self._first + self.slots_per_rank].tolist()
        return [
            f"layer {layer}, slot {self._first + slot}: not expert {expert}"
            for layer, row in enumerate(own)
            for slot, expert in enumerate(row)
            if not all(map(torch.equal, self.held[layer][slot], content_of(layer, expert)))
        ]


class FaultyGroup:
    """A group of ranks whose transport may damage what is received."""

    def __init__(self, group: RankGroup, calls: Calls) -> None:
        self._group, self._calls = group, calls
        self.rank, self.size = group.rank, group.size
        self.all_agree = group.all_agree
        self.gather_bytes = group.gather_bytes

    def send_receive(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        self._group.send_receive(sends, receives)
        for tensor, _ in receives:
            if self._calls.is_due("flip_receive", self._calls.number("receive")):
                tensor.view(torch.uint8)[0] ^= 1


@dataclass
class Moved:
    """The result of a migration on one rank."""

    error: EplbError | None
    map_LP: np.ndarray
    wrong_slots: list[str]
    counts: dict[str, int]


def move_experts(
    group: RankGroup,
    migration: Migration,
    fault: Fault,
    *,
    epoch: Callable[[int], int] = lambda chunks_done: chunks_done,
    transfer_type: Callable[..., ExpertTransfer] = ExpertTransfer,
    peers: Sequence[int] | None = None,
    ep_rank: int | None = None,
) -> Moved:
    """Run all chunks of a migration on this rank, and publish the map after each as an engine does."""
    peers = range(migration.layout.num_ranks) if peers is None else peers
    ep_rank = group.rank if ep_rank is None else ep_rank
    calls = Calls(group.rank, fault)
    slots: Any = MemorySlots(migration.before_LP, ep_rank, migration.layout.num_ranks, calls)
    checked: ExpertSlots = slots

    def prints(tensor: torch.Tensor) -> int:
        calls.may_fail("fingerprint")
        return fingerprint(tensor)

    def clock() -> float:
        number = calls.number("clock")
        return 1000.0 * (fault.kind == "late" and fault.rank == calls.rank and number >= fault.at)

    transfer = transfer_type(
        checked, FaultyGroup(group, calls), ep_rank=ep_rank, peers=peers, fingerprint=prints, clock=clock
    )
    in_force, error = migration.before_LP.copy(), None
    try:
        transfer.prepare(migration, epoch(0))
        for done, chunk in enumerate(migration.chunks):
            transfer.run(chunk, epoch(done))
            in_force[list(chunk.layers)] = migration.after_LP[list(chunk.layers)]
    except EplbError as failure:
        error = failure
    transfer.close()
    return Moved(error, in_force, slots.wrong_slots(in_force), calls.counts)

"""`GroupMember`: the groups that one rank has joined, and the calls in which it can be sent tensors.

Knows groups and transports.  Does not know what becomes of what is received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weight_sync.groups import WeightUpdateGroups
from weight_sync.held_memory import HeldMemory
from weight_sync.patience import Patience
from weight_sync.receivers.base import RefusedSource
from weight_sync.receivers.distributed import DistributedSource
from weight_sync.receivers.ipc import IpcSource


class GroupMember:
    """`device`: where the weights live.  `timeout_s`: deadline of a rendezvous and of one bucket.

    `patience`: with senders that are awaited, on the I/O thread.
    """

    def __init__(self, device: torch.device, timeout_s: float, held: HeldMemory) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self.patience = Patience()
        self._groups = WeightUpdateGroups(device, timeout_s, self.patience)
        self._held = held

    @property
    def is_open(self) -> bool:
        """Whether what is received may be kept in memory that stays for the next call."""
        raise NotImplementedError

    @property
    def holds_steps(self) -> bool:
        """Whether a bucket has to be there as a whole before any of it is looked at."""
        raise NotImplementedError

    def init_group(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str | None = None,
    ) -> None:
        """Join a group, blocking until all members have.  A group of this name is destroyed first.

        Raises `WeightRequestError`, `TransportError`.
        """
        self._groups.init(master_address, master_port, rank, world_size, group_name, backend)

    def destroy_group(self, group_name: str) -> None:
        """Leave a group.  Raises `UnknownGroupError`."""
        self._groups.destroy(group_name)

    def distributed_source(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        packed_bytes: int | None = None,
    ) -> DistributedSource:
        """One bucket that rank 0 of a joined group will broadcast, as `receivers.distributed` says.

        Raises `UnknownGroupError` besides the source's own errors; a group that it breaks is destroyed.
        """
        return DistributedSource(
            (names, dtypes, shapes),
            load_format,
            join=lambda: self._groups.get(group_name),
            leave=lambda: self.destroy_group(group_name),
            device=self._device,
            timeout_s=self._timeout_s,
            memory=self._held.receive if self.is_open else None,
            whole=self.holds_steps,  # what is wrong with a bucket is found before any of it is written
            packed_bytes=packed_bytes,
        )

    def refused_source(self, reason: str, group_name: str | None) -> RefusedSource:
        """A bucket that cannot be received; as its broadcast may be on its way, the group is left, or all (None)."""
        return RefusedSource(
            reason, self._groups.close if group_name is None else lambda: self.destroy_group(group_name)
        )

    def ipc_source(self, zmq_handles: Mapping[str, str]) -> IpcSource:
        """A conversation with a parameter server; `zmq_handles` has its address by device."""
        return IpcSource(zmq_handles, device=self._device, timeout_s=self._timeout_s, patience=self.patience)

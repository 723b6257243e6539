"""`WeightUpdateGroups`: the groups that one rank of an engine has joined, by name."""

from __future__ import annotations

import torch

from weight_sync import vllm_rendezvous
from weight_sync.errors import TransportError, UnknownGroupError, WeightRequestError
from weight_sync.process_group import PYNCCL, GroupHandle, init_process_group, resolve_backend
from weight_sync.waiting import Patience


def pair_name(group_name: str, rank: int) -> str:
    """Return the name under which a sender and one rank of an engine meet, in a group of their own."""
    return f"{group_name}-rank{rank}"


class WeightUpdateGroups:
    """`device`: where the weights live; decides the backend.  `timeout_s`: deadline of a rendezvous.

    `patience`: of all waits in the groups and for them.
    """

    def __init__(self, device: torch.device, timeout_s: float, patience: Patience) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._patience = patience
        self._groups: dict[str, GroupHandle] = {}

    def init(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str | None = None,
        meets_as: str | None = None,
    ) -> None:
        """Join a group, blocking until all members have.  Groups that rank 0 left, or of this name, are left first.

        `meets_as`: the name under which the members meet, if it is another one.

        Raises `WeightRequestError`, `TransportError`.
        """
        if rank < 1:
            raise WeightRequestError(f"rank 0 of a weight update group is the trainer; got rank {rank} for an engine")
        resolved = resolve_backend(backend, self._device)
        for name, group in list(self._groups.items()):
            if name == group_name or (group.watch is not None and group.watch.done()):
                self.destroy(name)
        try:
            self._groups[group_name] = init_process_group(
                master_address,
                master_port,
                rank,
                world_size,
                meets_as or group_name,
                "nccl" if resolved == PYNCCL else resolved,
                self._timeout_s,
                self._patience,
                vllm_rendezvous.connect_on(self._device) if resolved == PYNCCL else None,
            )
        except TransportError as error:
            if backend in (None, resolved):
                raise
            hint = f"this engine's weights are on a {self._device.type}, so it joined over {resolved}, not {backend}"
            raise TransportError(f"{error}; {hint}: the trainer's group must use {resolved}, too") from error

    def get(self, group_name: str) -> GroupHandle:
        """Return the joined group of this name.  Raises `UnknownGroupError`."""
        if group_name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise UnknownGroupError(f"weight update group {group_name!r} does not exist; joined groups: {known}")
        return self._groups[group_name]

    def destroy(self, group_name: str) -> None:
        """Leave a group.  Raises `UnknownGroupError`."""
        self.get(group_name)
        self._groups.pop(group_name).destroy()

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.destroy(name)

"""The process group between a trainer (rank 0) and engines (ranks 1..), built the way SGLang's clients build theirs.

    TCPStore(master) -> PrefixStore(group_name) -> torch's `_new_process_group_helper`      never the default group

Both sides use this file, and either side works with a peer that follows the same construction.  The group name is part
of the store's keys: with different names the two sides wait for each other until the deadline.
"""

from __future__ import annotations

import datetime
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weight_sync import nccl_group
from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.sealed_memory import MappedMemories
from weight_sync.waiting import Patience, in_thread

PYNCCL = "pynccl"
_NOT_EPHEMERAL = range(20_000, 32_000)  # Linux gives the local ends of connections ports from 32768 on
_PORTS_TRIED = 100
BACKENDS = ("gloo", "nccl", PYNCCL)
_CONNECT_RETRY_S = 0.05
_NUMBER_TAG = 1
_UNUSED_TAG = 2  # no message is sent under it
_JOIN_GRACE_S = 1.0
"""Seconds past the deadline of a rendezvous, so that torch's own errors arrive: they explain more."""
_LOST_GRACE_S = 5.0
"""Seconds after rank 0 has disconnected in which data that it had sent may still arrive from other members."""
_CLOSE_S = 1.0
_EVER = datetime.timedelta(days=365)


def resolve_backend(backend: str | None, device: torch.device | str) -> str:
    """Return the backend for tensors on `device`: on a CPU it is gloo for all names, as clients send "nccl" anyway.

    "pynccl" is NCCL with vLLM's rendezvous (`vllm_rendezvous`).

    Raises `WeightRequestError` for any other name.
    """
    if backend not in (None, *BACKENDS):
        raise WeightRequestError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    if torch.device(device).type == "cpu":
        return "gloo"
    return backend or "nccl"


@dataclass
class GroupHandle:
    """A joined group.  After a failed or late collective it is `broken` and can only be destroyed.

    `patience`: cancels waits in it, which breaks it.  `watch` is done once rank 0 has disconnected: amid a message gloo
    does not notice that, and would wait until the deadline.
    """

    name: str
    rank: int
    world_size: int
    backend: str
    timeout_s: float
    process_group: dist.ProcessGroup | None = field(repr=False)  # None before it is joined, and once destroyed
    broken: bool = False
    patience: Patience = field(default_factory=Patience, repr=False)
    watch: Future[None] | None = field(default=None, repr=False)
    listener: dist.Store | None = field(default=None, repr=False)
    """On rank 0 the store in which the members meet: without it a rendezvous that is under way fails on all of them."""
    is_connected: bool = field(default=False, repr=False)  # over NCCL, by a first collective
    memories: MappedMemories = field(default_factory=MappedMemories, repr=False)  # of rank 0, where it lends them
    _works: list[dist.Work] = field(default_factory=list, repr=False)  # not known to be over

    def start_broadcast(self, tensor: torch.Tensor, timeout_s: float | None = None) -> dist.Work:
        """Start a broadcast from rank 0.  Only the first one over NCCL waits for members that have not come yet.

        gloo itself gives up after `timeout_s` (default: the group's).  Raises `TransportError`.
        """
        if self.broken or self.process_group is None:
            raise TransportError(f"group {self.name!r} has failed or was left; join it again")
        within_s = self.timeout_s if timeout_s is None else timeout_s
        grace_s = nccl_group.WATCHDOG_GRACE_S if self.backend == "nccl" else 0.0
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = datetime.timedelta(seconds=within_s + grace_s)
        if self.backend == "nccl" and not self.is_connected:
            connecting = nccl_group.connect(self.process_group, tensor, options)
            self._wait("broadcast", lambda seconds: _is_done(connecting, seconds), time.monotonic() + within_s)
            self.is_connected = True
            self._works.append(connecting.result())
            return self._works[-1]
        try:
            work = self.process_group.broadcast([tensor], options)
        except RuntimeError as error:
            self.broken = True
            raise TransportError(f"broadcast in group {self.name!r} failed: {_first_line(error)}") from error
        self._works.append(work)
        return work

    def end_connecting(self, reason: str) -> None:
        """Cancel the wait of a first broadcast over NCCL for members of which one will not come.  On any thread."""
        if self.backend == "nccl" and not self.is_connected:
            self.patience.give_up(reason)

    def finish(self, work: dist.Work, deadline: float) -> None:
        """Wait for a collective until `deadline` (`time.monotonic()`).  Raises `TransportError`: the group is broken.

        NCCL ends collectives in order, so earlier ones are over, too.
        """
        is_over = _gloo_is_over if self.backend == "gloo" else nccl_group.is_over
        self._wait("broadcast", lambda seconds: is_over(work, seconds), deadline)
        if self.backend == "gloo":
            self._works.remove(work)
        elif work in self._works:
            place = self._works.index(work)
            nccl_group.let_go(self._works[:place])
            del self._works[: place + 1]

    def send_number(self, member: int, number: int, deadline: float) -> None:
        """Send a number to a member.  gloo only.  Raises `TransportError`; then the group is broken."""
        self._exchange(lambda group, box: group.send([box], member, _NUMBER_TAG), torch.tensor([number]), deadline)

    def receive_number(self, member: int, deadline: float) -> int:
        """Return the next number that the member sends to this one.  Raises as `send_number`."""
        box = torch.zeros(1, dtype=torch.int64)
        self._exchange(lambda group, box: group.recv([box], member, _NUMBER_TAG), box, deadline)
        return int(box)

    def destroy(self) -> None:
        """Leave the group.  This ends the wait of a peer in it at once; a peer that has left is no error."""
        self.listener = None
        self.memories.close()
        process_group, self.process_group = self.process_group, None
        if process_group is None:
            return
        if self.backend == "nccl":
            nccl_group.leave(process_group, broken=self.broken, timeout_s=_CLOSE_S)
            self._works.clear()
            return
        if self.broken or self.watch is not None:
            _close_connections(process_group, peer=int(self.rank == 0))
        if self.watch is not None:
            wait([self.watch], _CLOSE_S)
        dist.destroy_process_group(process_group)
        if stuck := [work for work in self._works if not work.is_completed()]:
            in_thread(_keep_until_over, process_group, stuck)
        self._works.clear()
        # With the last reference gone gloo closes its connections, which is what a peer notices.

    def _exchange(
        self, start: Callable[[dist.ProcessGroup, torch.Tensor], dist.Work], box: torch.Tensor, deadline: float
    ) -> None:
        if self.broken or self.process_group is None:
            raise TransportError(f"group {self.name!r} has failed or was left; join it again")
        # gloo closes the connections of a group in which such a wait was too short: one wait, on a thread.
        exchanged = in_thread(lambda group: start(group, box).wait(_remaining(deadline)), self.process_group)
        self._wait("an exchange", lambda seconds: _is_done(exchanged, seconds), deadline + _JOIN_GRACE_S)

    def _wait(self, what: str, is_over: Callable[[float], bool], deadline: float) -> None:
        give_up_at: float | None = None  # once rank 0 has disconnected

        def is_over_or_lost(seconds: float) -> bool:
            nonlocal give_up_at
            if is_over(seconds):
                return True
            now = time.monotonic()
            if give_up_at is None and self.watch is not None and self.watch.done():
                give_up_at = now + _LOST_GRACE_S
            if give_up_at is not None and now > give_up_at:
                raise RuntimeError("rank 0 has disconnected")
            return False

        try:
            if not self.patience.wait(is_over_or_lost, deadline):
                raise RuntimeError("timed out")
        except (RuntimeError, TransportError) as error:
            self.broken = True
            raise TransportError(f"{what} in group {self.name!r} failed: {_first_line(error)}") from error


def _gloo_is_over(work: dist.Work, seconds: float) -> bool:
    """Wait for a gloo collective, and tell whether it is over.  Raises the `RuntimeError` of one that failed."""
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _is_done(future: Future[Any], seconds: float) -> bool:
    """Wait for a call, and tell whether it is done.  Raises the error that it raised."""
    if not wait([future], seconds).done:
        return False
    future.result()
    return True


def _until_disconnected(group: dist.ProcessGroup) -> None:
    """Return once the connection to rank 0 is closed, by either side."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], 0, _UNUSED_TAG).wait(_EVER)


def _keep_until_over(group: dist.ProcessGroup, works: list[dist.Work]) -> None:
    """Hold a reference until the last one is over: gloo gives up messages at their deadline only."""
    for work in works:
        with suppress(RuntimeError):
            work.wait()


def _close_connections(group: dist.ProcessGroup, peer: int) -> None:
    """Close the connections: a collective that was given up, here or with a peer, ends at once and not at its deadline.

    Destroying the group would wait for it.
    """
    with suppress(RuntimeError):  # a wait that is too short closes them
        group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(datetime.timedelta(milliseconds=1))


Connect = Callable[[GroupHandle, dist.Store, float], dist.ProcessGroup]
"""Makes the group of a handle, whose members have a store in common; the deadline is one of `time.monotonic()`."""


def init_process_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
    patience: Patience | None = None,
    connect: Connect | None = None,
) -> GroupHandle:
    """Join, blocking until all `world_size` members have come.  Rank 0 listens at the master address.

    `connect`: makes the group once this process is in the store; None: as torch does.

    Raises `WeightRequestError` for arguments that cannot work, or a name that this process already uses;
    `TransportError` when the others do not come within about `timeout_s` seconds, or `patience` ends before.  When rank
    0 gives up, the others fail at once.
    """
    group = GroupHandle(group_name, rank, world_size, backend, timeout_s, None, patience=patience or Patience())
    _check_arguments(group, master_port)
    where = f"cannot join group {group_name!r} at {master_address}:{master_port} as rank {rank} of {world_size}"
    if rank == 0:
        try:
            # The group alone holds it, not the thread that joins, which may hang.  It listens on all addresses.
            group.listener = dist.TCPStore("127.0.0.1", master_port, world_size, True, wait_for_workers=False)
        except RuntimeError as error:
            raise TransportError(f"{where}: {_first_line(error)}") from error
    # torch's store client waits for ever for a peer that accepts the connection and sends nothing.
    joining = in_thread(_join, group, master_address, master_port, connect or _connect)
    try:
        if not group.patience.wait(
            lambda seconds: _is_done(joining, seconds), time.monotonic() + timeout_s + _JOIN_GRACE_S
        ):
            raise TransportError(f"the process that listens there did not answer within {timeout_s:g} s")
    except (RuntimeError, OSError, TransportError) as error:
        group.listener = None
        joining.add_done_callback(leave_late)
        raise TransportError(f"{where}: {_first_line(error)}") from error
    if backend == "gloo" and rank != 0:
        group.watch = in_thread(_until_disconnected, group.process_group)
    return group


def leave_late(joining: Future[GroupHandle]) -> None:
    """Leave a group whose caller has stopped waiting for it; for `add_done_callback`.

    Until its peer answers or closes the connection, such a call keeps a thread and a socket, and nothing else.
    """
    if joining.exception() is None:
        joining.result().destroy()


def _join(group: GroupHandle, master_address: str, master_port: int, connect: Connect) -> GroupHandle:
    deadline = time.monotonic() + group.timeout_s
    _wait_for_listener(master_address, master_port, deadline)
    store = dist.TCPStore(master_address, master_port, group.world_size, False, timeout=_remaining(deadline))
    group.process_group = connect(group, store, deadline)
    return group


def _connect(group: GroupHandle, store: dist.Store, deadline: float) -> dist.ProcessGroup:
    # `backend_options`/`pg_options` differ between torch releases; what is passed here is common to all of them.
    with nccl_group.errors_are_ours() if group.backend == "nccl" else nullcontext():
        process_group, _ = distributed_c10d._new_process_group_helper(
            group.world_size,
            group.rank,
            [],
            dist.Backend(group.backend),
            dist.PrefixStore(group.name, store),
            group_name=group.name,  # type: ignore[arg-type]
            timeout=_remaining(deadline),
        )
    # torch looks up a group's ranks here, also when it destroys the group.
    distributed_c10d._world.pg_group_ranks[process_group] = {member: member for member in range(group.world_size)}
    connected: dist.ProcessGroup = process_group
    return connected


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now on `address`, and that no connection which opens meanwhile is given.

    Raises `OSError` where none can be bound.
    """
    for port in random.SystemRandom().sample(_NOT_EPHEMERAL, _PORTS_TRIED):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
                return port
            except OSError as error:
                reason = error
    raise reason


def _check_arguments(group: GroupHandle, master_port: int) -> None:
    if not group.name:
        raise WeightRequestError("group_name must not be empty")
    if not 1 <= master_port <= 65535:
        raise WeightRequestError(f"master_port must be in 1..65535, got {master_port}")
    if group.world_size < 2 or not 0 <= group.rank < group.world_size:
        raise WeightRequestError(
            f"rank {group.rank} does not fit world_size {group.world_size} (at least 2: a trainer and an engine)"
        )
    if group.backend not in BACKENDS:
        raise WeightRequestError(f"unknown backend {group.backend!r}; known: {', '.join(BACKENDS)}")
    if group.name in distributed_c10d._world.pg_names.values():
        raise WeightRequestError(f"this process already has a process group named {group.name!r}")


def _wait_for_listener(address: str, port: int, deadline: float) -> None:
    """Wait for a listener: torch's client would overrun its timeout and print stack traces until there is one."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.001)).close()
            return
        except UnicodeError as error:  # a label that is empty, or over 63 characters
            raise WeightRequestError(f"master_address {address[:64]!r} is not a host name: {error}") from None
        except OSError as error:
            if time.monotonic() + _CONNECT_RETRY_S >= deadline:
                raise TransportError(
                    f"cannot connect to {address}:{port}, where no process listens: {error}"
                ) from error
            time.sleep(_CONNECT_RETRY_S)


def _remaining(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(deadline - time.monotonic(), 1.0))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300]

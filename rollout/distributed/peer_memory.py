"""`PeerMemory`: device memory that all ranks of a group on one machine see, for sums of small tensors in one kernel.

NCCL needs a gather and a sum for the same, and waits longer for few bytes.  The kernel is
`rollout.kernels.gpu.peer_sum`, its order of additions that of `Communicator.all_reduce`: the bits are the same.

It was not run on several GPUs.  Tests run the interpreted kernel in processes with shared host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import msgspec
import torch

from rollout.core.console import say
from rollout.distributed.communicator import Communicator


class RoomHandle(msgspec.Struct, array_like=True, frozen=True):
    """The memory of a rank, as torch describes it to other processes; `error`: why it cannot be shared."""

    handle: bytes = b""
    nbytes: int = 0
    offset_bytes: int = 0
    counter: bytes = b""
    counter_offset: int = 0
    event: bytes = b""
    event_sync_required: bool = False
    error: str = ""


class PeerMemory:
    """The rooms of all ranks, by rank, as this process sees them: uint8 tensors, filled with zeros at first.

    `fits` and `add` are functions of `rollout.kernels.gpu.peer_sum`.
    """

    def __init__(
        self,
        rooms: Sequence[torch.Tensor],
        rank: int,
        fits: Callable[[torch.Tensor], bool],
        add: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    ) -> None:
        self._opened = tuple(rooms)  # keeps them open
        self._rank, self._fits, self._add = rank, fits, add
        addresses = [room.data_ptr() for room in rooms]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=rooms[rank].device)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether `sum` takes a tensor: by its size and dtype, so that all ranks say the same."""
        return self._fits(tensor)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, added in rank order.  All ranks make the same calls, in order of a stream.

        The host waits for nothing.  If a rank is lost the device never finishes: `Communicator.wait_for` notices.
        """
        return self._add(tensor, self._addresses, self._rank)


def connect_peers(group: Communicator, device: torch.device) -> PeerMemory | None:
    """Open the memory of all ranks of `group` on their devices; every rank of the group calls this.

    Returns None on all ranks if one of them cannot open a room, and logs the reason.  Sums go over NCCL then.
    """
    kernel: Any = None
    room = torch.empty(0)
    try:
        kernel = import_module("rollout.kernels.gpu.peer_sum")
        room = torch.zeros(kernel.num_bytes(group.size), dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # the zeros are there before another rank raises a flag
        mine = _handle_of(room)
    except (ImportError, RuntimeError) as error:  # no triton, no memory, or none that can be shared
        mine = RoomHandle(error=_first_line(error))
    given = group.gather_bytes(msgspec.msgpack.encode(mine))
    handles = [msgspec.msgpack.decode(data, type=RoomHandle) for data in given]
    opened, reason = [], next((one.error for one in handles if one.error), "")
    for rank, one in enumerate(handles):
        if reason:
            break
        try:
            opened.append(room if rank == group.rank else _open(one, device))
        except RuntimeError as error:
            reason = _first_line(error)
    if group.all_agree(not reason):
        return PeerMemory(opened, group.rank, kernel.fits, kernel.peer_sum)
    if reason:
        say(f"rank {group.rank} of group {group.name!r}: small sums go over NCCL, no memory is shared: {reason}")
    return None


def _handle_of(room: torch.Tensor) -> RoomHandle:
    _, handle, nbytes, offset, counter, counter_offset, event, sync = room.untyped_storage()._share_cuda_()
    return RoomHandle(handle, nbytes, offset, counter, counter_offset, event, sync)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200] or type(error).__name__


def _open(one: RoomHandle, device: torch.device) -> torch.Tensor:
    """Map another rank's room.  It is opened on this rank's own device, which gives that device access to it."""
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        one.handle,
        one.nbytes,
        one.offset_bytes,
        one.counter,
        one.counter_offset,
        one.event,
        one.event_sync_required,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

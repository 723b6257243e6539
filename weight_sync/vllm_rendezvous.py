"""vLLM's rendezvous, by which senders of TRL and SkyRL join on CUDA: an id of NCCL in a store, and one all-reduce.

    store["broadcast_from/0/0"]   the sender's `ncclUniqueId`, pickled
    ncclCommInitRank              all members with that id; then an all-reduce of one float32

torch's NCCL finds the id of a group's first communicator in a store, under "0".  It gets it in a store of this process.
So the group is one of torch's, with all that `nccl_group` knows about those.

Shown with a sender's stand-in (`tests/pynccl_stand_in.py`); not run on GPUs.
"""

from __future__ import annotations

import datetime
import pickletools
import time
from typing import Any

import torch
import torch.distributed as dist

from weight_sync import nccl_group
from weight_sync.errors import TransportError
from weight_sync.process_group import Connect, GroupHandle

ID_KEY = "broadcast_from/0/0"
ID_BYTES = 128
_MAX_PICKLE = 1024


def connect_on(device: torch.device) -> Connect:
    """Return what connects a member whose weights are on `device`, as `init_process_group` takes it.

    It raises `TransportError`, and torch's errors.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # of this thread; another one will connect

    def connect(group: GroupHandle, store: dist.Store, deadline: float) -> dist.ProcessGroup:
        of_this_process = dist.HashStore()
        of_this_process.set("0", unique_id_of(store.get(ID_KEY)))  # type: ignore[arg-type]
        with nccl_group.errors_are_ours():
            backend: dist.ProcessGroup = nccl_backend(of_this_process, group.rank, group.world_size, group.timeout_s)
        work = backend.allreduce([torch.zeros(1, device=device)])
        if not nccl_group.is_over(work, deadline - time.monotonic()):
            raise TransportError("the first all-reduce of vLLM's rendezvous did not end")
        group.is_connected = True
        return backend

    return connect


def unique_id_of(pickled: bytes) -> bytes:
    """Return the bytes of a pickled `ncclUniqueId`, 128 of them; nothing in the pickle is executed.

    Raises `TransportError`.
    """
    found: list[bytes] = []
    if len(pickled) <= _MAX_PICKLE:
        try:
            found = [given for _, given, _ in pickletools.genops(pickled) if isinstance(given, bytes)]
        except Exception:  # the reader of opcodes fails in many ways on other bytes
            found = []
    if len(found) != 1 or len(found[0]) != ID_BYTES:
        raise TransportError(f"the sender's rendezvous has no NCCL id of {ID_BYTES} bytes under {ID_KEY!r}")
    return found[0]


def nccl_backend(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return torch's NCCL by itself, not registered as a process group: it has no name that others could look up."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout_s + nccl_group.WATCHDOG_GRACE_S)
    return dist.ProcessGroupNCCL(store, rank, world_size, options)

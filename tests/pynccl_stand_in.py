"""Stand-ins for the two sides of vLLM's rendezvous without a GPU: a sender, and torch's NCCL.

The sender does what vLLM's `StatelessProcessGroup` and `PyNcclCommunicator` do: a store without prefixes, an id pickled
as the ctypes structure that it is there, an all-reduce of one float32, broadcasts.  Behind the id is gloo in the place
of NCCL: it holds the port at which members with the same id meet.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import pickle
import struct
import sys
import types

import torch
import torch.distributed as dist

ID_BYTES = 128
_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
_TIMEOUT = datetime.timedelta(seconds=30)


class ncclUniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


def pickled(unique_id: bytes, protocol: int | None = None) -> bytes:
    """Return what vLLM puts into the store; this process can still not import vLLM afterwards."""
    module = types.ModuleType(_MODULE)
    module.ncclUniqueId = ncclUniqueId  # type: ignore[attr-defined]
    ncclUniqueId.__module__ = _MODULE
    parents = [_MODULE.rsplit(".", count)[0] for count in range(1, 4)]
    names = [name for name in [*parents, _MODULE] if name not in sys.modules]
    sys.modules.update({name: module if name == _MODULE else types.ModuleType(name) for name in names})
    try:
        return pickle.dumps(ncclUniqueId.from_buffer_copy(unique_id), protocol)
    finally:
        for name in names:
            del sys.modules[name]


class NcclStandIn:
    """Torch's NCCL: members that find the same id under "0" meet, and a broadcast is one of raw bytes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float = 30.0) -> None:
        unique_id = store.get("0")
        assert len(unique_id) == ID_BYTES
        (port,) = struct.unpack_from("<H", unique_id)
        meeting = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=_TIMEOUT)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(unique_id.hex(), meeting), rank, size, _TIMEOUT)
        self.allreduces = 0
        self.has_ended = False

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work:
        self.allreduces += 1
        return self._gloo.allreduce(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
        assert self.allreduces == 1, "vLLM's members reduce one number before anything else"
        return self._gloo.broadcast([tensors[0].reshape(-1).view(torch.uint8)], options)

    def shutdown(self) -> None:
        self.has_ended = True

    def abort(self) -> None:
        self.has_ended = True


class SenderStandIn:
    """The trainer's `PyNcclCommunicator`, rank 0.

    `port_of_nccl`: where members with its id meet.  `value`: what it puts into the store; None: the pickled id.
    """

    def __init__(self, port: int, world_size: int, port_of_nccl: int, value: bytes | None = None) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, world_size, True, timeout=_TIMEOUT)
        self._world_size = world_size
        self._unique_id = struct.pack("<H", port_of_nccl) + os.urandom(ID_BYTES - 2)
        self._store.set("broadcast_from/0/0", pickled(self._unique_id) if value is None else value)  # type: ignore[arg-type]

    def connect(self) -> None:
        store = dist.HashStore()
        store.set("0", self._unique_id)  # type: ignore[arg-type]
        self._nccl = NcclStandIn(store, 0, self._world_size)
        self._nccl.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast in the tensor's own dtype, as NCCL compares only the number of bytes."""
        self._nccl.broadcast([tensor], dist.BroadcastOptions()).wait()

"""`Transport`: how bytes get from rank to rank, over the backend of one process group.

                          gloo                        NCCL (`rollout.distributed.nccl`)
    tensors               in host memory              in device memory
    a call returns when   the bytes are there         the current stream will wait for them; the host does not
    a lost rank           raises after the deadline   is noticed later, where the host waits for the device

`Communicator` sends bytes, as NCCL and gloo know different dtypes, and computes sums in rank order itself.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

Parcel = tuple[torch.Tensor, int]  # uint8 [n], and the other rank


class Transport(ABC):
    """Tensors are contiguous uint8, and nothing else touches them until the call has returned.

    Every call raises `RuntimeError` if the backend can tell that a rank is lost.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Replace the content of `tensor` with rank `root`'s, on every rank."""
        options = _in_stream_order(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = root, 0
        self._wait(self.backend.broadcast([tensor], options), timeout_s)

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor, timeout_s: float) -> None:
        """Gather the tensors of all ranks into `out`, one after the other."""
        self._wait(self.backend._allgather_base(out, mine, gather_options()), timeout_s)

    @abstractmethod
    def all_gather_several(self, outs: Sequence[torch.Tensor], mine: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Gather several tensors as `all_gather` does, each into its own of `outs`."""

    def all_to_all(
        self,
        out: torch.Tensor,
        mine: torch.Tensor,
        receive_counts: Sequence[int],
        send_counts: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Send `send_counts[r]` rows of `mine` [n, width] to each rank r; receive `receive_counts[r]` rows of `out`."""
        options = _in_stream_order(AllToAllOptions())
        work = self.backend.alltoall_base(out, mine, list(receive_counts), list(send_counts), options)
        self._wait(work, timeout_s)

    @abstractmethod
    def send_receive(self, sends: Sequence[Parcel], receives: Sequence[Parcel], timeout_s: float) -> None:
        """Exchange all of `sends` and `receives` at once; the parcels of two ranks are in one order on both."""

    @abstractmethod
    def _wait(self, work: dist.Work | None, timeout_s: float) -> None:
        """Wait until later work may read the results of `work`; None if the call that gave it saw to that."""


class GlooTransport(Transport):
    """Each call blocks the host, for `timeout_s` at most."""

    def all_gather_several(self, outs: Sequence[torch.Tensor], mine: Sequence[torch.Tensor], timeout_s: float) -> None:
        for out, one in zip(outs, mine, strict=True):
            self.all_gather(out, one, timeout_s)

    def send_receive(self, sends: Sequence[Parcel], receives: Sequence[Parcel], timeout_s: float) -> None:
        works = [self.backend.recv([tensor], peer, 0) for tensor, peer in receives]
        works += [self.backend.send([tensor], peer, 0) for tensor, peer in sends]
        for work in works:
            self._wait(work, timeout_s)

    def _wait(self, work: dist.Work | None, timeout_s: float) -> None:
        assert work is not None, "gloo has a work for each call"
        work.wait(datetime.timedelta(seconds=timeout_s))


def gloo_transport(store: dist.Store, rank: int, size: int, timeout_s: float, *, loopback: bool) -> GlooTransport:
    """Connect to the other ranks, which all call this with the same `store`.  Raises `RuntimeError`."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        if loopback
        else dist.ProcessGroupGloo.create_default_device()
    ]
    return GlooTransport(dist.ProcessGroupGloo(store, rank, size, options))


def gather_options() -> Any:
    """Return the options of a gather that a backend with streams runs on the caller's stream."""
    return _in_stream_order(AllgatherOptions())


def _in_stream_order(options: Any) -> Any:
    """Return `options`, changed so that a backend with streams runs the call on the caller's stream."""
    options.asyncOp = False
    return options

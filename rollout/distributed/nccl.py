"""NCCL in addition to gloo: tensors on the devices go from device to device.

This module was not run on several GPUs.  Tests use a stand-in of the backend with its traps (`tests/nccl_stand_in.py`).

How a lost rank is noticed, where no call on the host waits for the others:

    the host waits for the device   `Communicator.wait_for` polls an event, and raises after its deadline
    anything else blocks            torch's watchdog ends this process, `WATCHDOG_GRACE_S` later; its parent tells why
    a rank has left                 the next exchange over gloo raises on all others

The watchdog ends processes rather than communicators.  After an aborted collective the stream goes on with bytes that
never came, and a reader would take them for a result.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rollout.core.errors import StartupError
from rollout.distributed.transport import Parcel, Transport, gather_options

WATCHDOG_GRACE_S = 60.0  # a deadline of our own has passed by then, with a better reason
CONNECT_TIMEOUT_S = 300.0  # ranks come as late as they come to the rendezvous
# torch's modes in which a failed collective does not end the process.
_HANDLING, _HANDLING_THAT_GOES_ON = "TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0", "2")


class NcclTransport(Transport):
    """A transport over NCCL: no call blocks the host, and a CUDA graph may capture any call."""

    def all_gather_several(self, outs: Sequence[torch.Tensor], mine: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Gather all tensors in one group of calls, which NCCL launches together."""
        self.backend._start_coalescing()
        for out, one in zip(outs, mine, strict=True):
            self.backend._allgather_base(out, one, gather_options())
        self._wait(self.backend._end_coalescing(), timeout_s)

    def send_receive(self, sends: Sequence[Parcel], receives: Sequence[Parcel], timeout_s: float) -> None:
        """Exchange all parcels in one group of calls: a lone send would wait for a receive not yet launched."""
        if not (sends or receives):
            return
        self.backend._start_coalescing()
        for tensor, peer in receives:
            self.backend.recv([tensor], peer, 0)
        for tensor, peer in sends:
            self.backend.send([tensor], peer, 0)
        self._wait(self.backend._end_coalescing(), timeout_s)

    def _wait(self, work: dist.Work | None, timeout_s: float) -> None:
        """Let the stream wait for `work`.  With a timeout the host would wait, millisecond by millisecond."""
        if work is not None:  # torch has none for a call with `asyncOp = False`: it is in the order of the stream
            work.wait()


def nccl_transport(store: dist.Store, rank: int, size: int, timeout_s: float, *, device: torch.device) -> NcclTransport:
    """Connect `device` to the devices of the other ranks, which all call this with the same `store`.

    Raises `StartupError` when they do not come, and what torch raises.
    """
    handling = os.environ.get(_HANDLING)
    if handling in _HANDLING_THAT_GOES_ON:
        raise StartupError(f"{_HANDLING}={handling} lets a rank continue without the data of a lost rank: unset it")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout_s + WATCHDOG_GRACE_S)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    connect(backend, device, CONNECT_TIMEOUT_S)
    return NcclTransport(backend)


def connect(backend: Any, device: torch.device, timeout_s: float) -> None:
    """Make the communicator now, rather than within the first step that uses it.

    NCCL waits for the other ranks without a deadline, so a thread of its own does.  Raises `StartupError` after
    `timeout_s`; the process has to end then.
    """
    failed: list[Exception] = []

    def wait() -> None:
        try:
            backend.eager_connect_single_device(device)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=wait, name="nccl-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise StartupError(f"{device}: NCCL did not reach the devices of the other ranks within {timeout_s:g} s")
    if failed:
        raise failed[0]

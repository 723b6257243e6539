"""`DeviceQueue`: work on the memory of one device that is given now and done later, and what waits for it.

A copy on a GPU has only been given when its call returns.  So four things must be waited for, and each is a line where
it happens:

    a bucket's memory is filled anew            `fence`, once what was written from it has been read
    staged content is read, or summed           `fence`
    a commit overwrites the serving weights     `fence_device` before it: steps that were given read the old ones
    ranks vote, and the new epoch is published  `fence` before it: the commit's copies are done, or have failed

On a CPU an operator is done when its call returns, and there is nothing to wait for.

`tests/gpu` ran `CudaQueue` on an H100; `tests/device_queue_stand_in.py` does everything as late as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceQueue(Protocol):
    """A queue that does each thread's work in order.  Threads have orders of their own (`use_own_stream`)."""

    def put(self, work: Callable[[], object]) -> None:
        """Give operators to the device.  What they read and write is in use until the next fence."""

    def fence(self) -> None:
        """Wait until all that this thread gave is done.  Raises what the device reports of it."""

    def fence_device(self) -> None:
        """Wait until all that any thread gave is done, steps included.  Raises as `fence`."""


class HostQueue:
    """A CPU, where everything is done at once."""

    def put(self, work: Callable[[], object]) -> None:
        work()

    def fence(self) -> None:
        """Do nothing: nothing is under way."""

    def fence_device(self) -> None:
        """Do nothing: nothing is under way."""


class CudaQueue:
    """The streams of a CUDA device: what a thread gives goes to the stream that is current in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def put(self, work: Callable[[], object]) -> None:
        work()

    def fence(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def fence_device(self) -> None:
        torch.cuda.synchronize(self._device)


def queue_of(device: torch.device | str) -> DeviceQueue:
    """Return the queue of the device on which weights lie."""
    device = torch.device(device)
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


def use_own_stream(device: torch.device | str) -> None:
    """Give this thread a stream of its own from now on, where `device` has streams.

    Copies and checks of an update would otherwise stand in line with the steps, and steps behind them.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))

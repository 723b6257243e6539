"""Transfers between host and device for which the host does not wait: by pinned memory, on the device's current stream.

    host      launch n ---------------------.  launch n+1 --.  wait for the event of n, read
                to_device |                  \\               \\
    stream      [inputs] kernels of n [results] event [inputs] kernels of n+1 [results] event

A plain `.to(device)` from pageable memory waits for all that the stream has, as `.cpu()` and `.item()` do.  Pinned
memory comes from torch's caching allocator, which hands a block out again once the copies that used it are done: so
a buffer may be dropped while its copies are in flight.  On a CPU nothing is copied.

In tests on a CPU `tests/device_stand_in.py` plays the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch

Record = TypeVar("Record")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the host's `tensor` to `device` without waiting; the caller may change `tensor` at once.

    On a CPU the result is `tensor` itself.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """The results of one step on their way to the host.

    `copy` each, then `close`, and `wait` before any copy is read.  All copies and the event go to the stream that was
    current at the beginning, where the kernels before them are: no memory of theirs is used again before it was copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._done: torch.cuda.Event | None = None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in pinned memory that holds `tensor` after `wait`; return a tensor of the host itself."""
        assert self._done is None, "the event was recorded before this copy"
        if tensor.is_cpu:
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            copied.copy_(tensor, non_blocking=True)
        return copied

    def copy_all(self, record: Record) -> Record:
        """Copy each tensor of a dataclass, and return a dataclass of the copies."""
        tensors = [getattr(record, item.name) for item in dataclasses.fields(record)]  # type: ignore[arg-type]
        return type(record)(*map(self.copy, tensors))

    def close(self) -> None:
        """Mark the end of the copies: none follow."""
        self._done = self._stream.record_event()

    def wait(self, wait_for: Callable[[torch.cuda.Event], None] | None = None) -> None:
        """Wait until the copies are done; kernels that were launched later go on meanwhile.

        `wait_for` waits for an event, by default without a deadline.
        """
        assert self._done is not None, "not closed"
        if wait_for is None:
            self._done.synchronize()
        else:
            wait_for(self._done)

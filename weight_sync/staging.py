"""The sinks of logical tensors: straight into the model, or kept by a transaction until its commit.

DirectSink    into the model: cold load
Staging       `shadow` and `in_model` have them: a live refresh

`DeviceQueue`: work on the memory of one device that is given now and done later, and what waits for it.

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

import functools
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from weight_sync.block_sums import kernels_of
from weight_sync.held_memory import Areas
from weight_sync.homes import Homes
from weight_sync.plan import BucketPlan
from weight_sync.take_pairs import PairsFound
from weight_sync.take_spans import Found, on_host
from weight_sync.tensor_meta import LogicalWeights, Pair, Part, parts_of

StagingMode = Literal["host", "device", "journal", "in_place"]
HOLDING_MODES = ("journal", "in_place")
"""`write` changes the model, so that no step may run from the first write to the end."""
Content = torch.Tensor | Pair | Part
"""A whole logical tensor, or what this rank holds of it."""
Accept = Callable[[np.ndarray, np.ndarray, PairsFound | None], None]
"""Takes what was found in the planned tensors of a bucket, as sent and as held: F of each, uint64 [T, 2], and whether
it has a value that is not finite, bool [T, 2].  And what was found in weights with tables of their own, if there are
any.  Raises what is wrong with them."""
_BUCKET = -1
"""The key of a bucket's area; others are addresses."""


class WeightSink(Protocol):
    """The place where logical tensors land."""

    def write(self, name: str, content: Content) -> None:
        """Take the content of logical tensor `name`, which is the caller's; a `Staging` may read it until `settle`."""

    def read(self, name: str) -> Sequence[Part]:
        """Return what was written under `name` as this rank's places hold it, or will; never to be written to."""


class Staging(WeightSink, Protocol):
    """The store of a transaction's tensors, and its rollback.  Used once.

        (write*  settle)*  ->  prepare  ->  commit  ->  close
                 |                |           |
                 `----------------+-----------`---->  undo

    `write`, `settle` and `prepare` run on the I/O thread, `commit` on the thread that runs steps.
    """

    @property
    def dirty(self) -> bool:
        """True if the model holds anything of this transaction, or may."""

    @property
    def num_bytes(self) -> int:
        """The memory, or disk, that is taken now."""

    @property
    def takes_spans(self) -> bool:
        """True if `write_spans` may be called."""

    def write_spans(self, plan: BucketPlan, content: torch.Tensor, accept: Accept) -> None:
        """Write the planned tensors of a bucket, uint8 [bytes].

        `accept` is called once, before the model changes.  Raises what it raises.
        """

    def settle(self) -> None:
        """Wait until what was written is no longer read from the caller's memory."""

    def prepare(self) -> None:
        """Do all of `commit` that can be done ahead.  The model stays as it is."""

    def commit(self) -> None:
        """Put everything written into the model: it is there when this returns.  Steps in flight read the old."""

    def undo(self) -> None:
        """Restore the old content, bit for bit, and release everything.

        Raises `StagingError`, or what a write raises, when that cannot be done: the model is torn then.
        """

    def close(self) -> None:
        """Release everything without touching the model."""


def takes_spans(homes: Homes) -> bool:
    """Return false where weights lie on a device without a kernel, which would need some calls for each tensor."""
    return homes.device is None or homes.device.type == "cpu" or kernels_of(homes.device) is not None


class SpanTaker:
    """Takes planned buckets where the weights lie.  `memory`: for a bucket that comes in other memory.

    Such a bucket is copied to the weights' device once, whole, and takes its size there until the next one comes.
    """

    def __init__(self, homes: Homes, queue: DeviceQueue, memory: Areas) -> None:
        self._homes, self._queue, self._memory = homes, queue, memory

    @property
    def is_able(self) -> bool:
        return takes_spans(self._homes)

    def bring(self, content: torch.Tensor) -> torch.Tensor:
        """Return a bucket on the weights' device; it may still be on its way there."""
        device = self._homes.device
        if device is None or content.device == device:
            return content
        area = self._memory.take(_BUCKET, content.numel(), device)
        self._queue.put(functools.partial(area.copy_, content, non_blocking=True))
        return area

    def find(self, take: Callable[[], tuple[Found, PairsFound | None]], accept: Accept) -> None:
        """Take a bucket by `take`, wait for the result, and call `accept` with it."""
        results: list[tuple[Found, PairsFound | None]] = []
        self._queue.put(lambda: results.append(take()))
        self._queue.fence()
        found, pairs = results[0]
        accept(*on_host(found), pairs)


class QueuedStaging:
    """The base of stagings: what they write to, and by which queue, with what memory.  `homes`: of `weights`."""

    def __init__(
        self,
        weights: LogicalWeights,
        queue: DeviceQueue | None = None,
        memory: Areas | None = None,
        homes: Homes | None = None,
    ) -> None:
        self._weights = weights
        self._queue = queue or HostQueue()
        self._memory = Areas() if memory is None else memory
        self._homes = Homes(weights) if homes is None else homes
        self._spans = SpanTaker(self._homes, self._queue, self._memory)

    @property
    def takes_spans(self) -> bool:
        return self._spans.is_able

    def settle(self) -> None:
        self._queue.fence()


class DirectSink:
    """Straight into every place of this rank; casts to the parameter's dtype."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights

    def write(self, name: str, content: Content) -> None:
        if isinstance(content, Part):
            self._weights.restore(name, content.content)
        else:
            self._weights.write(name, content)

    def read(self, name: str) -> Sequence[Part]:
        return parts_of(self._weights, name)


# --- what is waited for on a device -----------------------------------------------------------------------------------


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

"""A stand-in for torch's NCCL backend, over gloo in host memory, with the backend's promises and its traps.

    streams       a call returns before the bytes are there: until `work.wait()` the result is garbage, after it what
                  follows on the device sees them and the host still does not, before it waits for the device
    no work       a call whose options have `asyncOp = False` is in the order of the stream and returns None; so does a
                  group of such calls, and sends and receives always have a work
    host memory   is refused: all tensors must be on the device, contiguous, and bytes
    alone         a send or a receive outside of a group of calls, which would wait for the other rank's, is refused
    set up        a call before `eager_connect_single_device` would set the communicator up within a step: refused
    lost ranks    no call notices: the device never comes to its end; after a failure every later call raises
    the host      `work.wait(timeout)` blocks the host, which nothing in a step may do: refused

`OnDevice` marks what is in device memory, and so are results of operators on it.  Each rank is a thread with a device
of its own, whose work is done by another thread in the order in which it was enqueued.
"""

from __future__ import annotations

import datetime
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.distributed import communicator
from rollout.distributed.nccl import NcclTransport, connect
from rollout.distributed.transport import gloo_transport

GARBAGE = 0xA5
# Operators that make the host wait for the device: for a value, or for the size of their result.
_WAITS = frozenset({"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "equal"})
_WAITS |= {"bincount", "nonzero", "masked_select", "unique", "repeat_interleave"}
_READS_NOTHING = frozenset(
    {"__get__", "view", "new_empty", "numel", "unsqueeze", "is_contiguous", "dim", "size", "split"}
)
_MAX_S = 30.0  # what a test may hang


class Work:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.is_ordered = threading.Event()
        self.has_failed = False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        assert timeout is None, "wait(timeout) blocks the host until the device is done"
        self.is_ordered.set()
        OnDevice.local.ordered = [*OnDevice.ordered(), self]
        return True


class Stream:
    """The stream of one device.  After `error`, the first failure, it never comes to an end."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Work | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, job: Callable[[], None], work: Work | None = None) -> None:
        self._jobs.put((job, work))

    def _run(self) -> None:
        while True:
            job, work = self._jobs.get()
            try:
                if self.error is None:
                    job()
                elif work is not None:
                    work.has_failed = True
            except BaseException as error:
                self.error = error
                work.has_failed = True  # type: ignore[union-attr]
            if work is not None:
                work.ended.set()


class Event:
    """An event like `torch.cuda.Event`, recorded where it is made."""

    def __init__(self, stream: Stream) -> None:
        self._reached = threading.Event()
        stream.put(self._reached.set)

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        raise AssertionError("the host waits without a deadline for a device that waits for other ranks")


class OnDevice(torch.Tensor):
    """A tensor in device memory.  Operators on it run after the work that this thread's stream was made to wait for.

    `local.host_waits`: the operators of this thread for which the host had to wait.
    """

    local = threading.local()

    @classmethod
    def ordered(cls) -> list[Work]:
        return getattr(cls.local, "ordered", [])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_NOTHING:
            return super().__torch_function__(func, types, args, kwargs or {})
        for work in cls.ordered():
            assert work.ended.wait(_MAX_S), "the stand-in hangs"
        cls.local.ordered = failed = [work for work in cls.ordered() if work.has_failed]
        if name in _WAITS:
            cls.local.host_waits = [*getattr(cls.local, "host_waits", []), name]
        assert not (failed and name in _WAITS), f"{name} waits for a device that never comes to its end"
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is in memory now, as the host sees it without waiting for the device."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class Backend:
    """The calls of `torch.distributed.ProcessGroupNCCL` in use."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self._gloo = gloo_transport(store, rank, size, timeout_s, loopback=True)
        self._timeout_s = timeout_s
        self._group: list[Any] | None = None
        self._group_options: Any = None
        self._connected: torch.device | None = None
        self.stream = Stream()
        self.num_calls = 0

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device.type == "cuda" and device.index is not None
        self._connected = device

    def _comm_ptr(self) -> int:
        assert self._connected is not None
        return id(self)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Work | None:
        (tensor,) = tensors
        root = options.rootRank
        keeps = self._gloo.backend.rank() == root
        return self._call(
            [tensor],
            [] if keeps else [tensor],
            lambda real: self._gloo.broadcast(real[0], root, self._timeout_s),
            options,
        )

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor, options: Any) -> Work | None:
        if self._group is not None:
            self._group += [("gathered", out, -1), ("given", mine, -1)]
            self._group_options = options
            return None
        return self._call(
            [out, mine], [out], lambda real: self._gloo.all_gather(real[0], real[1], self._timeout_s), options
        )

    def alltoall_base(
        self, out: torch.Tensor, mine: torch.Tensor, receive: list[int], send: list[int], options: Any
    ) -> Work | None:
        assert out.shape[0] == sum(receive) and mine.shape[0] == sum(send), "Split sizes doesn't match total dim 0 size"
        return self._call(
            [out, mine],
            [out],
            lambda real: self._gloo.all_to_all(real[0], real[1], receive, send, self._timeout_s),
            options,
        )

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._point_to_point("send", tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._point_to_point("receive", tensors[0], peer)

    def _start_coalescing(self) -> None:
        assert self._group is None, "a group of calls within another"
        self._group, self._group_options = [], None

    def _end_coalescing(self) -> Work | None:
        group, self._group = self._group, None
        assert group, "an empty group of calls has no work"
        tensors = [tensor for _, tensor, _ in group]
        outs = [tensor for kind, tensor, _ in group if kind in ("receive", "gathered")]
        assert len({kind in ("gathered", "given") for kind, _, _ in group}) == 1, "gathers beside sends in one group"

        def exchange(real: list[torch.Tensor]) -> None:
            parcels = [(kind, tensor, peer) for (kind, _, peer), tensor in zip(group, real, strict=True)]
            if group[0][0] == "gathered":
                self._gloo.all_gather_several(real[::2], real[1::2], self._timeout_s)
                return
            sends = [(tensor, peer) for kind, tensor, peer in parcels if kind == "send"]
            receives = [(tensor, peer) for kind, tensor, peer in parcels if kind == "receive"]
            self._gloo.send_receive(sends, receives, self._timeout_s)

        return self._call(tensors, outs, exchange, self._group_options)

    def _point_to_point(self, kind: str, tensor: torch.Tensor, peer: int) -> None:
        assert self._group is not None, f"{kind} outside of a group of calls: both ranks would wait for each other"
        assert tensor.numel(), "an empty message"
        self._group.append((kind, tensor, peer))

    def _call(
        self,
        tensors: list[torch.Tensor],
        outs: list[torch.Tensor],
        exchange: Callable[[list[torch.Tensor]], None],
        options: Any,
    ) -> Work | None:
        if self.stream.error is not None:
            raise RuntimeError(f"NCCL communicator was aborted: {self.stream.error}")
        assert self._connected is not None, "the communicator would be set up within a step"
        for tensor in tensors:
            if not isinstance(tensor, OnDevice):
                raise RuntimeError("Tensors must be CUDA and dense")
            assert tensor.is_contiguous() and tensor.dtype == torch.uint8
        self.num_calls += 1
        work, memory = Work(), [memory_of(tensor) for tensor in tensors]
        written = [any(tensor is out for out in outs) for tensor in tensors]
        given = [tensor.clone() if is_out else tensor for tensor, is_out in zip(memory, written, strict=True)]
        for tensor in itertools.compress(memory, written):
            tensor.fill_(GARBAGE)

        def job() -> None:
            with torch.inference_mode():
                exchange(given)
                assert work.is_ordered.wait(self._timeout_s), "nobody waited for this call"
                for tensor, brought in itertools.compress(zip(memory, given, strict=True), written):
                    tensor.copy_(brought)

        self.stream.put(job, work)
        if options is None or options.asyncOp:
            return work
        work.wait()
        return None


def stand_in_transport(store: dist.Store, rank: int, size: int, timeout_s: float) -> NcclTransport:
    """Return the transport that `nccl_transport` makes, over the stand-in."""
    backend = Backend(store, rank, size, timeout_s)
    connect(backend, torch.device("cuda", rank), timeout_s)
    return NcclTransport(backend)


@contextmanager
def devices() -> Iterator[None]:
    """Let communicators take tensors marked `OnDevice` to be in device memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "is_on_device", lambda tensor: isinstance(tensor, OnDevice))
        yield

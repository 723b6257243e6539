"""A stand-in for the part of `torch.cuda` that `CudaGraphPool` uses; it keeps to the documented order.

torch's notes on CUDA graphs: warm up on a side stream, which first waits for the current one; the current one waits for
the side stream before the capture; graphs that share a pool name its handle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stream:
    """`seen[other]`: up to which of its launches this stream has waited for the other."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.launched = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        self.seen[other] = other.launched

    def has_seen(self, other: Stream) -> bool:
        return self.seen.get(other, -1) == other.launched


class CudaStandIn:
    """The part of `torch.cuda` that the pool uses.  `launch` is the work of a run."""

    def __init__(self) -> None:
        self.default = Stream()
        self.default.launched = 1  # the step before
        self.stream_now = self.default
        self.capturing: Any = None
        self.is_idle = False  # since a capture in pieces began
        self.handles = 0
        self.graphs: list[Any] = []

    def launch(self) -> None:
        stream = self.stream_now
        assert stream is not self.default, "warm-up and capture run on a side stream"
        assert stream.has_seen(self.default), "the side stream has not waited for what the step before launched"
        if self.capturing is None:
            stream.launched += 1
        else:
            self.capturing.launches += 1

    def graph_pool_handle(self) -> tuple[int, int]:
        self.handles += 1
        return (0, self.handles)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.stream_now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    @contextmanager
    def graph(
        self, graph: Any, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert self.stream_now is self.default and stream is not None and stream.launched, "a capture without warm-up"
        assert self.default.has_seen(stream), "the warm-up may still be running"
        assert capture_error_mode == "thread_local", "weights arrive on another thread meanwhile"
        graph.pool, self.capturing = pool, graph
        with self.stream(stream):
            yield
        self.capturing = None
        self.graphs.append(graph)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all streams: a capture begins with an idle device."""
        assert self.capturing is None, "a wait in a capture"
        self.is_idle = True

    def begin(self, graph: Any, pool: Any, capture_error_mode: str) -> None:
        assert self.capturing is None, "a capture in a capture"
        assert self.is_idle and self.stream_now.launched, "a capture without warm-up, or beside work of other streams"
        assert capture_error_mode == "thread_local", "weights arrive on another thread meanwhile"
        graph.pool, self.capturing = pool, graph

    def end(self, graph: Any) -> None:
        assert self.capturing is graph
        self.capturing = None
        self.graphs.append(graph)


class GraphStandIn:
    cuda: CudaStandIn  # the device of all graphs

    def __init__(self) -> None:
        self.launches, self.replays, self.pool = 0, 0, None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.cuda.begin(self, pool, capture_error_mode)

    def capture_end(self) -> None:
        self.cuda.end(self)

    def replay(self) -> None:
        self.replays += 1

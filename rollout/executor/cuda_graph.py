"""`CudaGraphPool`: recordings of CUDA kernels.

A capture must not wait for the device, copy between host and device other than from pinned memory, or run on another
stream (CUDA programming guide, "CUDA Graphs"; torch.cuda.graphs).  A capture allocates its memory from the pool, and
the next capture uses that memory again; addresses in a recording never change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout.executor.captures import Between, Work

_WARM_UPS = 2  # the first call compiles and loads kernels and makes workspaces, the second finds them


class CudaGraphPool:
    """Graphs that are captured and replayed on one stream of `device`, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture `run`, as `GraphPool` describes.  Other threads may use the device meanwhile."""
        self._warm_up(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def capture_in_pieces(self, run: Callable[[Between], None]) -> Callable[[], None]:
        """Capture `run` as one graph before, between and after the work that it passes on; see `GraphPool`.

        The graphs are captured and replayed in one order, and one recording is replayed at a time.  So a later piece
        may use the memory again that an earlier one has given back.
        """
        self._warm_up(lambda: run(lambda work: work()))
        torch.cuda.synchronize(self._device)
        plays: list[Callable[[], None]] = []
        with torch.cuda.stream(self._stream):
            graph = self._begin()

            def between(work: Work) -> None:
                nonlocal graph
                graph.capture_end()
                work()
                plays.extend((graph.replay, work))
                graph = self._begin()

            run(between)
            graph.capture_end()
        plays.append(graph.replay)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        in_order = tuple(plays)
        plays.clear()  # `between` holds the list: work that holds `between` would keep the graphs in a cycle

        def replay() -> None:
            for play in in_order:
                play()

        return replay

    def _warm_up(self, run: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(self._stream)

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        return graph


def graph_pools(device: torch.device) -> Callable[[], CudaGraphPool] | None:
    """Return the maker of pools for recordings on `device`; None: nothing is captured there."""
    return (lambda: CudaGraphPool(device)) if device.type == "cuda" else None

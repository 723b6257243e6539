"""The limits of the device: bandwidth of a copy and of a read, and matrix arithmetic, measured when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TRIES = 10


@dataclass(frozen=True)
class Ceilings:
    """Rates a second, each the best of some tries.

    `copy_bytes_per_s`: bytes read and bytes written by a copy within the device's memory; `read_bytes_per_s`: bytes
    read by a sum; `bf16_flops_per_s`: operations of a product of random matrices.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    bf16_flops_per_s: float

    def least_seconds(self, bytes_read: float, flops: float) -> float:
        """Return the least time that the roofline allows (Williams et al., 2009)."""
        bandwidth = max(self.copy_bytes_per_s, self.read_bytes_per_s)
        return max(bytes_read / bandwidth, flops / self.bf16_flops_per_s)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure a copy of 4 GiB and a product of 8192^3; on a CPU, a small copy and a small product."""
    on_cuda = device.type == "cuda"
    count, size = (1 << 30, 8192) if on_cuda else (1 << 20, 256)
    copied, read = _memory(count, device)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    multiplied = best_seconds(lambda: a @ b, device)
    return Ceilings(copied, read, 2 * size**3 / multiplied)


def _memory(count: int, device: torch.device) -> tuple[float, float]:
    """Return the bytes a second of a copy, read and written, and of a sum, over `count` float32."""
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = best_seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / copied, source.nbytes / best_seconds(source.sum, device)


def best_seconds(work: Callable[[], object], device: torch.device, tries: int = TRIES) -> float:
    """Return the shortest time of some runs on the device's own clock, after three runs that warm up."""
    for _ in range(3):
        work()
    return min(_seconds(work, device) for _ in range(tries))


def best_seconds_of_each(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Run `works` one after the other, and return the time of one of them.

    On a GPU they are played from a CUDA graph: the host's time to launch their kernels does not count.
    """

    def run() -> None:
        for work in works:
            work()

    if device.type != "cuda":
        return best_seconds(run, device) / len(works)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # kernels are compiled at their first launch
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return best_seconds(graph.replay, device) / len(works)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return seconds

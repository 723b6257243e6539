"""The limits of the machine: memory bandwidth and matrix arithmetic, measured with the threads that torch uses now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MATMUL_SIZE = 2048


@dataclass(frozen=True)
class Machine:
    """Bytes and floating-point operations a second with all threads, best of a few tries."""

    read_bytes_per_s: float
    bf16_flops_per_s: float
    fp32_flops_per_s: float

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """Return the peak of a matrix product in `dtype`: bfloat16 has its own, all others have float32's."""
        return self.bf16_flops_per_s if dtype == torch.bfloat16 else self.fp32_flops_per_s

    def least_seconds(self, bytes_moved: int, flops: int, dtype: torch.dtype) -> float:
        """Return the roofline: the larger of the times to move the bytes and to compute (Williams et al., 2009)."""
        return max(bytes_moved / self.read_bytes_per_s, flops / self.peak_flops_per_s(dtype))


def measure_machine() -> Machine:
    """Measure a sum over 1 GiB, and a matmul of 2048^3 in bfloat16 and in float32.

    A processor without instructions for bfloat16 has float32's peak for it, as operators widen what they read.  Torch's
    own bfloat16 products, which oneDNN does not compute, take minutes there.
    """
    fp32 = _product_flops_per_s(MATMUL_SIZE, torch.float32)
    by_onednn = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    bf16 = _product_flops_per_s(MATMUL_SIZE, torch.bfloat16) if by_onednn else 0.0
    return Machine(read_bytes_per_s=measure_reading(), bf16_flops_per_s=max(bf16, fp32), fp32_flops_per_s=fp32)


def _product_flops_per_s(size: int, dtype: torch.dtype) -> float:
    matrix = torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_seconds(lambda: matrix @ matrix)


def measure_reading() -> float:
    """Return the bytes a second of a sum over 1 GiB.

    On a shared machine the rate changes within seconds: measure it together with the numbers to compare.
    """
    data = torch.ones(1 << 27, dtype=torch.float64)
    return data.nbytes / best_seconds(data.sum)


def best_seconds(work: Callable[[], object], tries: int = 5) -> float:
    """Return the seconds of the shortest of a few runs, after one that warms up."""
    work()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)

"""Several ranks in one process, a thread each: real gloo groups, the same code as between processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import MakeTransport, Parallel, join

T = TypeVar("T")
TIMEOUT_S = 60.0


def run_ranks(
    layout: ParallelLayout,
    work: Callable[[Parallel], T],
    timeout_s: float = TIMEOUT_S,
    device_transport: MakeTransport | None = None,
) -> list[T]:
    """Run `work(parallel)` on every rank of the layout at once, and return the results by world rank.

    Raises the first error.
    """
    store = dist.HashStore()
    failed: list[tuple[int, BaseException]] = []
    lock = threading.Lock()
    kept: list[Parallel] = []

    def one(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                parallel = join(
                    layout,
                    rank,
                    store,
                    timeout_s=timeout_s,
                    weight_timeout_s=timeout_s,
                    device_transport=device_transport,
                )
                kept.append(parallel)  # a rank that is done leaves the groups only when all are
                return work(parallel)
        except BaseException as error:
            with lock:
                failed.append((rank, error))
            raise

    with ThreadPoolExecutor(layout.world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(layout.world_size)]
        for future in futures:
            future.exception()
    if failed:
        raise failed[0][1]
    return [future.result() for future in futures]

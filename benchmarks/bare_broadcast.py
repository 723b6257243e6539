"""`BareBroadcast`: what gloo needs for the bytes of a refresh between two processes that do nothing else.

Run as a program, this module is the receiving process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType

import torch

from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port, init_process_group

TIMEOUT_S = 300.0


class BareBroadcast:
    """Broadcasts of `buckets` (packed, uint8) to a peer, which waits inside the block with all memory ready."""

    def __init__(self, buckets: list[torch.Tensor]) -> None:
        self._buckets = buckets

    def __enter__(self) -> BareBroadcast:
        port = free_port()
        sizes = [str(bucket.numel()) for bucket in self._buckets]
        self._peer = subprocess.Popen([sys.executable, "-m", "benchmarks.bare_broadcast", str(port), *sizes])
        try:
            self._group = _join(port, 0)
            _broadcast(self._group, self._buckets)  # first use
        except BaseException:
            self._end_peer()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._group.destroy()
        self._end_peer()

    def seconds(self) -> float:
        """Return the seconds of one broadcast of everything, until the peer has it."""
        start = time.perf_counter()
        _broadcast(self._group, self._buckets)
        return time.perf_counter() - start

    def peer_cpu_seconds(self) -> float:
        """Return the CPU time of the peer so far."""
        return cpu_seconds(self._peer.pid)

    def _end_peer(self) -> None:
        self._peer.terminate()
        self._peer.wait(TIMEOUT_S)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, of all its threads, in user and kernel mode."""
    return time.clock_gettime(~pid << 3 | 2)  # `clock_getcpuclockid` of Linux: nanoseconds, where /proc has 10 ms


def _join(port: int, rank: int) -> GroupHandle:
    return init_process_group("127.0.0.1", port, rank, 2, f"bare-{port}", "gloo", TIMEOUT_S)


def _broadcast(group: GroupHandle, buckets: list[torch.Tensor]) -> None:
    for bucket in buckets:
        group.finish(group.start_broadcast(bucket, TIMEOUT_S), time.monotonic() + TIMEOUT_S)
    acknowledge = torch.zeros(1, dtype=torch.uint8)  # the peer has everything when it takes part in one more
    group.finish(group.start_broadcast(acknowledge, TIMEOUT_S), time.monotonic() + TIMEOUT_S)


def _receive(port: int, sizes: list[int]) -> None:
    group = _join(port, 1)
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    try:
        with suppress(TransportError):  # the other end has left
            while True:
                _broadcast(group, buckets)
    finally:
        group.destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Internal: the receiving end of the bare broadcast.")
    parser.add_argument("port", type=int)
    parser.add_argument("sizes", type=int, nargs="+")
    args = parser.parse_args()
    _receive(args.port, args.sizes)

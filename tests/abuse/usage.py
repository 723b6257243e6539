"""The memory, descriptors and sockets that the processes of a server use.  Read from /proc."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MB = 1 << 20


@dataclass(frozen=True)
class Usage:
    """Sums over the processes of a server; bytes."""

    rss: int
    peak_rss: int
    descriptors: int


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants, parents first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def usage_of(pids: Iterable[int]) -> Usage:
    """Sum what the processes use; one that is gone counts nothing."""
    rss = peak = descriptors = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            rss += status_bytes(status, "VmRSS")
            peak += status_bytes(status, "VmHWM")
            descriptors += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Usage(rss, peak, descriptors)


def forget_peaks(pids: Iterable[int]) -> None:
    """Let `peak_rss` start from now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def limit_memory(pids: Iterable[int], further: int) -> None:
    """Let each process take no more than `further` bytes of private memory from now on."""
    for pid in pids:
        with contextlib.suppress(OSError):
            now = status_bytes(Path(f"/proc/{pid}/status").read_text(), "VmData")
            hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
            resource.prlimit(pid, resource.RLIMIT_DATA, (now + further, hard))


def status_bytes(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) << 10 if found else 0

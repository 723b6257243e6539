"""Memory that a step gives back stays for the next one: counted in page faults, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

# Straight from the C library: a tensor's bookkeeping would lie between its buffers, now here and now there.
PROGRAM = """
import ctypes, resource, sys
from rollout.engine.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def step(size=20 << 20):
    buffers = [libc.malloc(size) for _ in range(6)]  # together more than glibc keeps unasked
    for buffer in buffers:
        libc.memset(buffer, 1, size)
    for buffer in buffers:
        libc.free(buffer)

step(); step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 6 * (20 << 20) // os.sysconf("SC_PAGE_SIZE")


def faults(mode: str, **environment: str) -> int:
    command = [sys.executable, "-c", PROGRAM, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_the_second_step_finds_the_memory_of_the_first() -> None:
    assert faults("kept") < PAGES // 50
    assert faults("not") > PAGES // 5


def test_what_the_environment_says_stays() -> None:
    assert faults("kept", MALLOC_MMAP_THRESHOLD_="131072") > PAGES // 2

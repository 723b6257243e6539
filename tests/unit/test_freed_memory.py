"""What the allocator keeps of a step's memory once it is freed, in processes of their own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
from rollout.mem_cache.memory import keep_freed_memory

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghi"] + [("keepcost", ctypes.c_size_t)]

if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(1 << 20))  # from here on the heap has pieces of this size
pieces = [libc.malloc(1 << 20) for _ in range(200)]
for piece in reversed(pieces):
    libc.free(piece)
print(libc.mallinfo2().keepcost >> 20)
"""


def kept(word: str, **environment: str) -> int:
    """MiB that are free at the end of the heap and stay this process's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT, word]
    return int(subprocess.run(command, env=clean | environment, check=True, capture_output=True, timeout=120).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 and newer say what they keep")
def test_the_next_step_finds_the_memory_of_the_one_before() -> None:
    assert kept("keep") >= 190
    assert kept("usual") <= 10, "what glibc keeps by itself"
    assert kept("keep", MALLOC_TRIM_THRESHOLD_="131072") <= 10, "the environment decides where it says something"

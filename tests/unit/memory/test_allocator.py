"""Memory that is given back: a step's stays for the next one, bodies' for all threads.  In processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

# Straight from the C library: a tensor's bookkeeping would lie between its buffers, now here and now there.
PROGRAM = """
import ctypes, resource, sys
from rollout.memory.allocator import keep_freed_memory

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


BODIES = """
import ctypes, os, sys, threading
from rollout.memory.allocator import share_freed_memory

if sys.argv[1] == "shared":
    share_freed_memory()

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def filled(size):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    return block

def serve():
    libc.free(filled(24 << 20))
    bodies = []
    for _ in range(20):
        bodies.append(filled(1 << 20))
        filled(64)  # a request leaves it behind for long, as a line of the log
    for body in bodies:
        libc.free(body)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def run(turn):
    turns[turn].wait()
    serve()
    turns[turn + 1].set()
    ends.wait()

before, ends, turns = resident(), threading.Event(), [threading.Event() for _ in range(9)]
threads = [threading.Thread(target=run, args=(turn,)) for turn in range(8)]
for thread in threads:
    thread.start()
turns[0].set()
turns[-1].wait()
print(resident() - before)
ends.set()
"""
PER_THREAD = 20 << 20


def left(mode: str, **environment: str) -> int:
    """Return the bytes that stay after bodies in eight threads, one thread after the other."""
    command = [sys.executable, "-c", BODIES, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_threads_use_the_memory_that_others_have_freed() -> None:
    assert left("shared") < 4 * PER_THREAD
    assert left("not") > 7 * PER_THREAD
    assert left("shared", MALLOC_ARENA_MAX="64") > 7 * PER_THREAD, "the environment's word comes first"

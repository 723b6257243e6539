"""Memory that a step gives back stays for the next one: counted in page faults, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import resource, sys, torch
from rollout.engine.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def step():
    buffers = [torch.ones(5 << 20) for _ in range(6)]  # 20 MB each, together more than glibc keeps unasked

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

"""What the C library's allocator does with memory that a step gives back."""

from __future__ import annotations

import ctypes
import os

# Each layer of a step asks for the same few buffers.  By default glibc gives them back to the system and asks for them
# again: at a prefill of 2048 tokens hundreds of thousands of page faults, a fifth of its time (docs/benchmarks.md).
# malloc.h's parameters by number.  Buffers of 32 MB, the most that glibc takes, still get a mapping of their own where
# nothing large enough lies free.
_MIB = 1 << 20
KEPT_BYTES = 256 * _MIB
_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 * _MIB),
    "MALLOC_TRIM_THRESHOLD_": (-1, KEPT_BYTES),
    "MALLOC_TOP_PAD_": (-2, 64 * _MIB),
}


def keep_freed_memory() -> None:
    """Let this process keep up to `KEPT_BYTES` of freed memory for the next step, where its allocator is glibc's.

    What is free now, as after loading, goes back.  A parameter that the environment sets stays as it is.  The pages go
    back when a server releases its memory.
    """
    libc = ctypes.CDLL(None)
    mallopt, trim = getattr(libc, "mallopt", None), getattr(libc, "malloc_trim", None)
    if mallopt is None or trim is None:
        return
    trim(0)
    for name, (number, value) in _SETTINGS.items():
        if name not in os.environ:
            mallopt(number, value)

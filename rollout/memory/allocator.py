"""Settings of the C library's allocator for freed memory: the environment's parameters come first."""

from __future__ import annotations

import ctypes
import os

_MIB = 1 << 20
KEPT_BYTES = 256 * _MIB

# malloc.h's parameters by number.

# Each layer of a step asks for the same few buffers.  By default glibc gives them back to the system and asks for them
# again: at a prefill of 2048 tokens hundreds of thousands of page faults, a fifth of its time.
# Buffers of 32 MB, glibc's maximum, still get a mapping of their own if no free block is large enough.
_KEEP = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 * _MIB),
    "MALLOC_TRIM_THRESHOLD_": (-1, KEPT_BYTES),
    "MALLOC_TOP_PAD_": (-2, 64 * _MIB),
}
# By default the first block of 20 MB that is freed puts all smaller ones into heaps, and each thread has a heap of its
# own.  Small blocks hold them in place: 80 MB after 100,000 bodies of all sizes, of which 21 were in use.  Two heaps
# serve all threads here.  Mappings for blocks of a megabyte would keep less, and answers of 8 MB took 4 % longer.
_SHARE = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 * _MIB),
    "MALLOC_TRIM_THRESHOLD_": (-1, 32 * _MIB),
    "MALLOC_ARENA_MAX": (-8, 2),
}


def keep_freed_memory() -> None:
    """Let this process keep up to `KEPT_BYTES` of freed memory for the next step, if its allocator is glibc's.

    Memory that is free now, as after loading, goes back at once.  The rest goes back when a server releases its memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
        _set(_KEEP)


def share_freed_memory() -> None:
    """Let all threads of this process allocate from the same two heaps, if its allocator is glibc's.

    Call it before threads begin, as they get their heaps then.
    """
    _set(_SHARE)


def _set(parameters: dict[str, tuple[int, int]]) -> None:
    """Set these parameters of the allocator, except parameters that the environment sets."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, (number, value) in parameters.items():
        if mallopt is not None and name not in os.environ:
            mallopt(number, value)

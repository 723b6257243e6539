"""`MemoryPages`: memory whose pages can go back to the system while its addresses stay; `HostPages` on a CPU.

discard    the pages go back           a CPU: they read as zeros, and come again when written
                                       CUDA (`device_pages`): an access faults until `provide`
provide    pages are there again, zeros
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from rollout.core.errors import LockstepError, StartupError


class MemoryTakenError(LockstepError):
    """Memory that was given back cannot be taken again: others hold it.  Nothing changed."""

    status_code = 503


@dataclass(frozen=True)
class Span:
    """The bytes of one storage."""

    address: int
    nbytes: int


class MemoryPages(Protocol):
    """The memory pages of one device.  Every span is the span of a storage that `check` accepted."""

    def pool(self, tag: str) -> AbstractContextManager[object]:
        """Make this thread's tensors on the device of pages that can go back, separate from pages of other tags."""

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise `StartupError` if the pages of a tensor cannot go back."""

    def discard(self, spans: Sequence[Span]) -> None:
        """Give back the pages of these bytes, which must be unused.  Bytes next to them keep their content."""

    def provide(self, spans: Sequence[Span]) -> None:
        """Allocate pages for these bytes; new pages hold zeros.  Raises `MemoryTakenError`."""

    def is_provided(self, spans: Sequence[Span]) -> bool:
        """Return whether these bytes may be read and written."""

    def read(self, span: Span) -> Iterator[memoryview]:
        """Yield the bytes in parts.  Each part is valid until the next one is taken."""

    def fill(self, span: Span) -> Iterator[memoryview]:
        """Yield parts of the same sizes as `read`.  The caller fills each part before it asks for the next."""


class HostPages:
    """Private anonymous memory, as torch allocates it on a CPU, with Linux' meaning of `MADV_DONTNEED`."""

    def __init__(self) -> None:
        """Open the C library.  Raises `StartupError` on other systems than Linux."""
        if sys.platform != "linux":
            raise StartupError(f"--enable-memory-saver works on Linux only, this is {sys.platform}")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def pool(self, tag: str) -> AbstractContextManager[object]:
        return nullcontext()

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        if any(not tensor.is_cpu for tensor in tensors):
            raise StartupError("--enable-memory-saver works on a CPU or a CUDA device only: start without it")

    def discard(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._discard(span)
        trim = getattr(self._libc, "malloc_trim", None)  # glibc's: memory freed meanwhile goes back as well
        if trim is not None:
            trim(0)

    def provide(self, spans: Sequence[Span]) -> None:
        """Do nothing: the system allocates a page when it is written."""

    def is_provided(self, spans: Sequence[Span]) -> bool:
        return True

    def read(self, span: Span) -> Iterator[memoryview]:
        yield memoryview((ctypes.c_ubyte * span.nbytes).from_address(span.address)).cast("B")

    fill = read

    def _discard(self, span: Span) -> None:
        page, end = mmap.PAGESIZE, span.address + span.nbytes
        first, last = -(-span.address // page) * page, end // page * page
        if first >= last:
            ctypes.memset(span.address, 0, span.nbytes)
            return
        # Pages at the rims are shared with the neighbours.
        ctypes.memset(span.address, 0, first - span.address)
        ctypes.memset(last, 0, end - last)
        if self._libc.madvise(first, last - first, mmap.MADV_DONTNEED) != 0:
            ctypes.memset(first, 0, last - first)  # locked pages stay, but the content is the same


def spans_of(tensors: Sequence[torch.Tensor]) -> list[Span]:
    """Return the spans of the storages behind the tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    return [Span(address, nbytes) for address, nbytes in sizes.items()]

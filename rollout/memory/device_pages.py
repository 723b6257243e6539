"""Pages of a CUDA device that go back to it while their addresses stay, so that captured graphs stay valid.

Tensors that are made inside `pool` lie in areas of the driver's virtual memory (`kernels/csrc_driver/device_pages.cpp`,
compiled at first use).  Torch's allocator cuts these up as it does its own segments:

    area   |  weight  |  weight  |gap|      gap: other content of a pool, such as tables computed from settings

An area goes back as a whole.  So gaps are copied to the host and put back: a few MB, as areas are made for tensors.

`tests/gpu` runs this module on an H100 with small models; other tests use `tests/cuda_driver_stand_in.cpp`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from rollout.core.errors import StartupError
from rollout.kernels import shipped
from rollout.kernels.build import KernelBuildError, build_kernels
from rollout.memory.host_pages import HostPages, MemoryPages, MemoryTakenError, Span

SOURCES = shipped.DRIVER_SOURCES
DRIVER = "libcuda.so.1"
_PART_BYTES = 64 << 20  # size of the buffer for kept copies
_ALLOC, _FREE = "lockstep_pages_alloc", "lockstep_pages_free"


def select_pages(device: torch.device) -> MemoryPages:
    """Return the memory pages of a device.  Raises `StartupError`."""
    if device.type != "cuda":
        return HostPages()
    library = open_library(DRIVER)
    return DevicePages(library, wait=partial(torch.cuda.synchronize, device), trim=torch.cuda.empty_cache)


def open_library(driver: str) -> ctypes.CDLL:
    """Load the compiled allocator, which calls the CUDA driver's library `driver`.  Raises `StartupError`."""
    try:
        library = ctypes.CDLL(str(shipped.driver_library() or build_kernels(sources=SOURCES)))
    except KernelBuildError as error:
        raise StartupError(f"--enable-memory-saver on CUDA compiles its allocator: {error}") from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.lockstep_pages_error.restype = ctypes.c_char_p
    library.lockstep_pages_alloc.restype = pointer
    library.lockstep_pages_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, pointer]
    library.lockstep_pages_free.argtypes = [pointer, size, ctypes.c_int, pointer]
    library.lockstep_pages_area.argtypes = [pointer, ctypes.POINTER(pointer), ctypes.POINTER(size)]
    library.lockstep_pages_discard.argtypes = library.lockstep_pages_provide.argtypes = [pointer]
    library.lockstep_pages_read.argtypes = library.lockstep_pages_write.argtypes = [pointer, pointer, size]
    if library.lockstep_pages_open(driver.encode()) != 0:
        raise StartupError(f"--enable-memory-saver on CUDA: {_reason(library)}")
    return library


class DevicePages:
    """`wait()` blocks until the device has no work left; `trim()` gives back memory that torch's allocator caches."""

    def __init__(self, library: ctypes.CDLL, *, wait: Callable[[], object], trim: Callable[[], object]) -> None:
        self._library = library
        self._wait, self._trim = wait, trim
        self._pools: dict[str, tuple[torch.cuda.memory.CUDAPluggableAllocator, torch.cuda.MemPool]] = {}
        """The allocator must live as long as its pool."""
        self._gaps: dict[int, list[tuple[int, bytes]]] = {}
        """The address and content of each gap, by the first address of an area without memory."""

    def pool(self, tag: str) -> AbstractContextManager[object]:
        if tag not in self._pools:
            allocator = torch.cuda.memory.CUDAPluggableAllocator(self._library._name, _ALLOC, _FREE)
            self._pools[tag] = allocator, torch.cuda.MemPool(allocator.allocator())
        return torch.cuda.use_mem_pool(self._pools[tag][1])

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.untyped_storage().nbytes() and self._area(tensor.untyped_storage().data_ptr()) is None:
                raise StartupError(f"a tensor of {tuple(tensor.shape)} lies outside of the memory that can be released")

    def discard(self, spans: Sequence[Span]) -> None:
        self._wait()
        for area in self._areas(spans):
            if area.start not in self._gaps:
                gaps = [(gap.start, self._copied(gap)) for gap in _between(area, spans)]
                self._require(self._library.lockstep_pages_discard(area.start), "released")
                self._gaps[area.start] = gaps
        self._trim()

    def provide(self, spans: Sequence[Span]) -> None:
        self._trim()
        given: list[int] = []
        for area in self._areas(spans):
            if area.start not in self._gaps:
                continue
            if self._library.lockstep_pages_provide(area.start) != 0:
                reason = _reason(self._library)
                for start in given:
                    self._require(self._library.lockstep_pages_discard(start), "released again")
                raise MemoryTakenError(
                    f"{len(area) / 2**20:.0f} MiB of device memory are not to be had ({reason}): others hold it; let "
                    "them give it back and resume again"
                )
            given.append(area.start)
        for start in given:
            for address, content in self._gaps.pop(start):
                self._require(self._library.lockstep_pages_write(address, content, len(content)), "written")
        self._wait()

    def is_provided(self, spans: Sequence[Span]) -> bool:
        return all(area.start not in self._gaps for area in self._areas(spans))

    def read(self, span: Span) -> Iterator[memoryview]:
        self._wait()
        for address, part in self._parts(span):
            self._require(self._library.lockstep_pages_read(part.data_ptr(), address, part.numel()), "read")
            yield part.numpy().data

    def fill(self, span: Span) -> Iterator[memoryview]:
        for address, part in self._parts(span):
            yield part.numpy().data
            self._require(self._library.lockstep_pages_write(address, part.data_ptr(), part.numel()), "written")
        self._wait()

    def _parts(self, span: Span) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the address of each part of the span, with a buffer of the part's size on the host."""
        buffer = torch.empty(min(span.nbytes, _PART_BYTES), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        for start in range(0, span.nbytes, _PART_BYTES):
            yield span.address + start, buffer[: min(_PART_BYTES, span.nbytes - start)]

    def _areas(self, spans: Sequence[Span]) -> list[range]:
        """Return the areas in which the spans lie, each once."""
        found = {}
        for span in spans:
            area = self._area(span.address)
            assert area is not None and span.address + span.nbytes <= area.stop, "`check` saw it there"
            found[area.start] = area
        return list(found.values())

    def _area(self, address: int) -> range | None:
        begin, size = ctypes.c_void_p(), ctypes.c_size_t()
        if self._library.lockstep_pages_area(address, ctypes.byref(begin), ctypes.byref(size)) != 0:
            return None
        return range(begin.value or 0, (begin.value or 0) + size.value)

    def _copied(self, gap: range) -> bytes:
        content = ctypes.create_string_buffer(len(gap))
        self._require(self._library.lockstep_pages_read(content, gap.start, len(gap)), "read")
        return content.raw

    def _require(self, status: int, done: str) -> None:
        """Raise `RuntimeError` if the driver refused a call: the device is lost then."""
        if status != 0:
            raise RuntimeError(f"device memory could not be {done}: {_reason(self._library)}")


def _between(area: range, spans: Sequence[Span]) -> Iterator[range]:
    """Yield the parts of the area that no span covers."""
    at = area.start
    for span in sorted(spans, key=lambda span: span.address):
        if span.address in area:
            if at < span.address:
                yield range(at, span.address)
            at = max(at, span.address + span.nbytes)
    if at < area.stop:
        yield range(at, area.stop)


def _reason(library: ctypes.CDLL) -> str:
    reason: bytes = library.lockstep_pages_error()
    return reason.decode()

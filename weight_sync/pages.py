"""Memory in whole pages: areas that go back to the system at once, and two spans that trade their pages.

A trade moves page-table entries and copies nothing (`mremap`).  Weights of 487 MB take 10 ms of CPU time to prepare and
commit where an exchange by exclusive or takes 302 (docs/benchmarks/refresh.md), and are read as fast afterwards.  Each
move leaves an empty mapping behind, so that no other thread's memory can get in between:

    live     old ---.      .--> new        1  live    -> scratch
                     \\    /                2  shadow  -> live
    scratch   -      old  /                3  scratch -> shadow
                       \\ /
    shadow   new -------'--> old

Addresses stay, content changes places.  A huge page moves as one only between addresses that are equal modulo its size,
which is what `new_area(at=...)` is for.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import operator
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from weight_sync.errors import StagingError

HUGE_PAGE = 2 << 20
_MIN_TRADE_BYTES = 16 * mmap.PAGESIZE  # below, copying is as fast
_MOVE_AND_KEEP = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_START, _STOP = operator.attrgetter("start"), operator.attrgetter("stop")
_MAX_MAPPINGS = 65530  # Linux's default


def new_area(num_bytes: int, at: int = 0) -> torch.Tensor:
    """Return private memory in huge pages where there are some, zeros, uint8 [num_bytes]; it goes back with the last
    view.

    Its address equals `at` modulo the size of a huge page.  Where the system has no such memory: plain memory of torch,
    with any content.
    """
    if num_bytes < mmap.PAGESIZE or not _has_pages():
        return torch.empty(num_bytes, dtype=torch.uint8)
    offset = at % HUGE_PAGE
    first, end = _page_floor(offset), _page_ceil(offset + num_bytes)
    reserved = _map(end + HUGE_PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
    base = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    # Only whole pages that hold content stay: a huge page around them would take unused memory.
    _unmap(reserved, base + first - reserved)
    _unmap(base + end, reserved + end + HUGE_PAGE - (base + end))
    _libc().madvise(base + first, end - first, mmap.MADV_HUGEPAGE)
    content = (ctypes.c_ubyte * num_bytes).from_address(base + offset)
    weakref.finalize(content, _unmap, base + first, end - first).atexit = False
    return torch.frombuffer(content, dtype=torch.uint8)


def mapped_file(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Return the first bytes of an open file, uint8 [num_bytes], which may be read alone; unmapped with the last view.

    The file must not get shorter meanwhile: a read past its end ends the process.  Raises `StagingError`.
    """
    address = _map(num_bytes, mmap.PROT_READ, descriptor=descriptor)
    content = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(content, _unmap, address, num_bytes).atexit = False
    return torch.frombuffer(content, dtype=torch.uint8)


class PageTrader:
    """Trades spans of at most `max_bytes`.  `close` releases the scratch addresses.

    `lost`: why content is where it does not belong, after a trade that could neither be completed nor rolled back.
    """

    def __init__(self, max_bytes: int) -> None:
        self.lost: str | None = None
        self._reserved = max_bytes + HUGE_PAGE
        self._scratch = _map(self._reserved, _PROT_NONE, _MAP_NORESERVE)
        self._free = weakref.finalize(self, _unmap, self._scratch, self._reserved)
        self._free.atexit = False

    def trade(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Trade the content of two spans; uint8 [n], as `tradable_spans` gave them.

        Nothing else may touch either meanwhile.  Raises `StagingError`: nothing has changed then, or `lost` is set.
        """
        first, second, num_bytes = one.data_ptr(), other.data_ptr(), one.numel()
        scratch = self._scratch + (first - self._scratch) % HUGE_PAGE
        assert scratch + num_bytes <= self._scratch + self._reserved, "a larger span than was announced"
        made: list[tuple[int, int]] = []
        try:
            for source, target in ((first, scratch), (second, first), (scratch, second)):
                _move(source, target, num_bytes)
                made.append((source, target))
        except OSError as error:
            try:
                for source, target in reversed(made):
                    _move(target, source, num_bytes)
            except OSError as again:
                self.lost = f"pages could not be moved ({error}), nor moved back ({again})"
            raise StagingError(self.lost or f"pages could not be moved: {error}") from error

    def close(self) -> None:
        self._free()


def tradable_spans(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[list[range]]:
    """Return what can be traded of each pair of equally long byte tensors: ranges of offsets, ascending.

    These are whole pages of private anonymous memory, at the same offsets in both.  There are none where the system
    cannot move pages, or has several memory nodes: pages would move away from the cores that read them.  Of many the
    longest are taken, as a process has a limited number of mappings, and each trade cuts some in parts.
    """
    if not pairs or not _can_trade():
        return [[] for _ in pairs]
    lines = _mappings()
    mappings = [found for found in map(_movable_mapping, lines) if found is not None]
    return _longest([_spans_of(live, shadow, mappings) for live, shadow in pairs], _max_spans(len(lines)))


def _longest(spans: list[list[range]], count: int) -> list[list[range]]:
    """Return the `count` longest spans, each where it was; of equally long ones the first."""
    numbered = [(number, span) for number, some in enumerate(spans) for span in some]
    if len(numbered) <= count:
        return spans
    found: list[list[range]] = [[] for _ in spans]
    for number, span in sorted(numbered, key=lambda one: -len(one[1]))[:count]:
        found[number].append(span)
    return [sorted(some, key=_START) for some in found]


def _spans_of(live: torch.Tensor, shadow: torch.Tensor, mappings: Sequence[range]) -> list[range]:
    if live.numel() < _MIN_TRADE_BYTES or not live.is_cpu or not shadow.is_cpu or live.data_ptr() % 8:
        return []
    if (live.data_ptr() - shadow.data_ptr()) % mmap.PAGESIZE:
        return []
    spans = []
    for one in _movable_pages(live, mappings):
        for other in _movable_pages(shadow, mappings):
            both = range(max(one.start, other.start), min(one.stop, other.stop))
            if len(both) >= _MIN_TRADE_BYTES:
                spans.append(both)
    return spans


def _movable_pages(tensor: torch.Tensor, mappings: Sequence[range]) -> list[range]:
    """Return the offsets of whole pages inside `tensor`, a range for each mapping: a move cannot cross from one to the
    next.
    """
    address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
    found = []
    after = bisect.bisect_right(mappings, address, key=_STOP)
    for number in range(after, len(mappings)):
        mapping = mappings[number]
        if mapping.start >= end:
            break
        first, last = max(_page_ceil(address), mapping.start), min(_page_floor(end), mapping.stop)
        if first < last:
            found.append(range(first - address, last - address))
    return found


def _mappings() -> list[bytes]:
    """Return a line for each of this process's mappings, ascending by address."""
    return Path("/proc/self/maps").read_bytes().splitlines()


@functools.lru_cache(maxsize=4096)
def _movable_mapping(line: bytes) -> range | None:
    """Return the addresses of a mapping, by its line; None where its memory has a file, or is a stack.

    An engine has hundreds of mappings, and nearly all are as they were before.  Large parts of a model may lie in the
    heap.  To cut a line takes a third of the time of a regular expression.
    """
    addresses, access, _, _, inode, *name = line.split(None, 5)
    is_anonymous = inode == b"0" and (not name or name == [b"[heap]"] or name[0].startswith(b"[anon"))
    if access != b"rw-p" or not is_anonymous:
        return None
    start, end = addresses.split(b"-")
    return range(int(start, 16), int(end, 16))


def _can_trade() -> bool:
    return _has_pages() and _num_memory_nodes() == 1 and _pages_move()


@functools.cache
def _pages_move() -> bool:
    """Find out by trial, on two small areas: systems differ, and so do the sandboxes around them."""
    one, other = new_area(mmap.PAGESIZE), new_area(mmap.PAGESIZE)
    one.fill_(1)
    other.fill_(2)
    trader = PageTrader(mmap.PAGESIZE)
    try:
        trader.trade(one, other)
        return bool((one == 2).all() and (other == 1).all())
    except StagingError:
        return False
    finally:
        trader.close()


def _has_pages() -> bool:
    return sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


@functools.cache
def _num_memory_nodes() -> int:
    nodes = Path("/sys/devices/system/node")
    return sum(path.name[4:].isdigit() for path in nodes.glob("node*")) if nodes.exists() else 1


def _max_spans(num_mappings: int) -> int:
    """Return how many spans a process with this number of mappings may trade.

    Each makes up to four mappings.  They take at most a quarter of all that a process may have, and half of those left.
    A commit that runs out of mappings cannot be undone, as the undo needs some, too.
    """
    most = _mappings_limit()
    return max(0, min(most // 16, (most - num_mappings) // 8))


@functools.cache
def _mappings_limit() -> int:
    limit = Path("/proc/sys/vm/max_map_count")
    return int(limit.read_text()) if limit.exists() else _MAX_MAPPINGS


def _page_floor(address: int) -> int:
    return address // mmap.PAGESIZE * mmap.PAGESIZE


def _page_ceil(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(num_bytes: int, protection: int, flags: int = 0, descriptor: int = -1) -> int:
    """Map private anonymous memory, or that of a file, and return its address.  Raises `StagingError`."""
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if descriptor < 0 else mmap.MAP_SHARED
    found = _libc().mmap(None, num_bytes, protection, flags, descriptor, 0)
    if found == _FAILED:
        raise StagingError(f"the system cannot allocate {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(found)


def _unmap(address: int, num_bytes: int) -> None:
    if num_bytes:
        _libc().munmap(address, num_bytes)


def _move(source: int, target: int, num_bytes: int) -> None:
    if _libc().mremap(source, num_bytes, num_bytes, _MOVE_AND_KEEP, target) != target:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t], *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc

"""Memory of another process on a CUDA device, by the handle that torch's reductions put into a payload.

A handle opens on the same machine and the same device only, while its owner keeps the memory.  SGLang's clients put the
device's UUID where torch puts its index, as two processes may number devices differently; both are read.

A sender's memory is its own again once the counter of each handle is 0.  torch counts down when the memory that it
opened is closed here, after a wait for this thread's stream; for a handle that was not opened, as its call was refused
or another handle of the same memory was opened, `release` does.  So every handle is counted down exactly once.

Each tensor that a sender shares has a handle with a counter and an event of its own, also where all lie in one bucket.
The memory is opened once for all of them, with the last one's event: it was recorded last, so what the sender gave to
its stream for the others has been done as well.

Memory is open for one call, or for one conversation of checkpoint-engine, and never longer.  Only a counter above 0
keeps the sender from giving the memory back to the driver; an event only orders writes before reads.  Without a count
the allocation could be freed while it is mapped here, which CUDA leaves undefined, and another one could come under the
same handle.  With a count a sender that makes a bucket for each call could not use the last one's memory for the next,
and a trainer that goes to sleep would keep it.

torch takes a handle at its word: it counts down the counter that the handle names, wherever that is, and gives a tensor
of the size that it states.  So both are checked here, against the file of counters and the allocation.  Expandable
segments of torch's allocator consist of many allocations, mapped one behind the other into a range that torch reserves
for nothing else: there the check goes from one to the next.

Nothing here runs without a CUDA device: a process that sees none refuses the payload.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weight_sync.errors import TransportError, WeightRequestError, WeightSyncError
from weight_sync.shared_segment import torch_shared_file

_COUNTERS = 10_000  # in one file; torch's CUDA_IPC_REF_COUNTER_FILE_SIZE
_COUNTER_BYTES = 8
_PLAIN_HANDLE_BYTES = 64
"""The length of a handle before torch 2.5.  Later handles begin with a version and a kind."""
_EXPANDABLE = b"e"
_HEADER_BYTES = 26
"""The start of a handle in an expandable segment: version, kind, the owner's process, the bytes of an allocation, and
their number.  The handle of each allocation follows.
"""
_FABRIC_HANDLE_BYTES = 64
"""CU_MEM_HANDLE_TYPE_FABRIC; a file's descriptor takes 4."""
_ALLOCATION_BYTES = 2 << 20
"""The smallest allocation that a device maps; torch's have 2 or 20 MiB."""


def max_handle_bytes(nbytes: int) -> int:
    """Return the most bytes that the handle of a storage of `nbytes` has, which names each allocation that it touches.

    A storage of 1 GiB touches 53 allocations of 20 MiB, of which 26 + 53 x 64 bytes tell.  A limit by size lets every
    storage of a device through, and refuses a handle that is too long for its storage.
    """
    return _HEADER_BYTES + _FABRIC_HANDLE_BYTES * (nbytes // _ALLOCATION_BYTES + 2)


@dataclass(frozen=True)
class CudaHandle:
    """The memory of a pickled CUDA tensor, as the pickle describes it; `device` is an index or a UUID."""

    device: int | str
    memory: bytes
    nbytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync_required: bool

    @property
    def place(self) -> tuple[int | str, bytes, int, int]:
        """The memory, whichever handle names it."""
        return self.device, self.memory, self.offset_bytes, self.nbytes

    @property
    def is_expandable(self) -> bool:
        """True for memory in an expandable segment."""
        return len(self.memory) != _PLAIN_HANDLE_BYTES and self.memory[1:2] == _EXPANDABLE


def check_counters(handles: Iterable[CudaHandle]) -> None:
    """Raise `WeightRequestError` unless the counters lie in files of counters, as torch makes them."""
    names = set[bytes]()
    for handle in handles:
        if not 0 <= handle.counter_offset < _COUNTERS:
            raise WeightRequestError(f"a CUDA handle names counter {handle.counter_offset} of {_COUNTERS}")
        names.add(handle.counter)
    for name in names:
        torch_shared_file(name.decode("ascii", "replace"), _COUNTERS * _COUNTER_BYTES).check()


@dataclass(eq=False)
class CudaStorage:
    """A `Storage` on a CUDA device; it is opened at the first `read`, which may raise `TransportError`."""

    handle: CudaHandle
    has_views = True
    _uncounted: list[CudaHandle] = field(init=False)
    """Names what is not counted down, and will not be by closing the memory."""

    def __post_init__(self) -> None:
        self._uncounted = [self.handle]

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", device_index(self.handle.device))

    def add(self, handle: CudaHandle) -> None:
        """Take a later handle of the same memory, before the first `read`."""
        assert handle.place == self.handle.place
        self._uncounted.append(handle)

    def read(self, start: int, stop: int, room: torch.Tensor | None = None) -> torch.Tensor:
        """Return a view of the owner's memory, uint8 on its device."""
        return self._content[start:stop]

    def release(self) -> None:
        """Give the memory back to its owner, as far as this process has it.  Raises nothing; may be repeated."""
        self.__dict__.pop("_content", None)
        while self._uncounted:
            handle = self._uncounted.pop()
            with suppress(RuntimeError, WeightSyncError):  # its owner has ended, or this torch knows no CUDA
                check_counters([handle])
                torch.UntypedStorage._release_ipc_counter(handle.counter, handle.counter_offset, device="cuda")

    @cached_property
    def _content(self) -> torch.Tensor:
        check_counters(self._uncounted)
        handle = self._uncounted[-1]
        try:
            content: torch.Tensor = rebuild_cuda_tensor(
                torch.Tensor,
                (handle.nbytes,),
                (1,),
                0,
                torch.UntypedStorage,
                torch.uint8,
                device_index(handle.device),
                handle.memory,
                handle.nbytes,
                handle.offset_bytes,
                False,
                handle.counter,
                handle.counter_offset,
                handle.event,
                handle.event_sync_required,
            )
        except RuntimeError as error:
            raise TransportError(f"the sender's CUDA memory cannot be opened: {error}") from error
        self._uncounted.pop()
        opened = content.data_ptr() - handle.offset_bytes
        end = _end_of(opened, content.data_ptr() + handle.nbytes, across=handle.is_expandable)
        if content.data_ptr() + handle.nbytes > end:
            raise WeightRequestError(
                f"a CUDA handle names bytes {handle.offset_bytes} to {handle.offset_bytes + handle.nbytes} of an "
                f"allocation of {end - opened}"
            )
        return content


def _end_of(address: int, stop: int, *, across: bool) -> int:
    """Return where the allocation at `address` ends.  `across`: where an unbroken row of them ends, as far as `stop`.

    Raises `TransportError`.
    """
    base, size = allocation_of(address)
    end = base + size
    with suppress(TransportError):  # nothing is mapped behind the last one
        while across and end < stop:
            base, size = allocation_of(end)
            if base != end:
                break
            end += size
    return end


def allocation_of(address: int) -> tuple[int, int]:
    """Return address and bytes of the allocation on a device that holds `address`.  Raises `TransportError`."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if found != 0:
        raise TransportError(f"the allocation of the sender's CUDA memory cannot be found: error {found}")
    return base.value, size.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def require_cuda() -> None:
    """Raise `WeightRequestError` unless this process can use a CUDA device."""
    if not torch.cuda.is_available():
        raise WeightRequestError(
            "the payload holds CUDA IPC handles, but this engine has no CUDA device. Send CPU tensors (sharing "
            "strategy 'file_system') or safetensors."
        )


def device_index(device: int | str) -> int:
    """Return this process's index of the device.  Raises `WeightRequestError` for one that it does not see."""
    count = torch.cuda.device_count()
    if isinstance(device, int):
        if not 0 <= device < count:
            raise WeightRequestError(f"the payload lives on CUDA device {device}; this engine sees {count}")
        return device
    for index in range(count):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        if uuid.removeprefix("GPU-") == device.removeprefix("GPU-"):
            return index
    raise WeightRequestError(f"the payload lives on CUDA device {device[:64]!r}, which this engine does not see")

"""Memory of another process on a CUDA device, by the handle that torch's reductions put into a payload.

A handle opens on the same machine and the same device only, while its owner keeps the memory.  SGLang's clients put the
device's UUID where torch puts its index, as two processes may number devices differently; both are read.

A sender's memory is its own again once the counter of each handle is 0.  torch counts down when the memory that it
opened is closed here, after a wait for this thread's stream; for a handle that was never opened, as its call was
refused, `release` does.  So every handle is counted down exactly once.

torch takes a handle at its word: it counts down the counter that the handle names, wherever that is, and gives a tensor
of the size that it states.  So both are checked here, against the file of counters and the allocation.

Nothing here runs without a CUDA device: a process that sees none refuses the payload.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weight_sync.errors import TransportError, WeightRequestError, WeightSyncError
from weight_sync.shared_segment import torch_shared_file

_COUNTERS = 10_000  # in one file; torch's CUDA_IPC_REF_COUNTER_FILE_SIZE
_COUNTER_BYTES = 8


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

    def check_counter(self) -> None:
        """Raise `WeightRequestError` unless the counter lies in a file of counters, as torch makes them."""
        if not 0 <= self.counter_offset < _COUNTERS:
            raise WeightRequestError(f"a CUDA handle names counter {self.counter_offset} of {_COUNTERS}")
        torch_shared_file(self.counter.decode("ascii", "replace"), _COUNTERS * _COUNTER_BYTES).check()


@dataclass(eq=False)
class CudaStorage:
    """A `Storage` on a CUDA device; it is opened at the first `read`, which may raise `TransportError`."""

    handle: CudaHandle
    _is_counted_down: bool = False  # or will be, when the opened memory is closed

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a view of the owner's memory, uint8 on its device."""
        return self._content[start:stop]

    def release(self) -> None:
        """Give the memory back to its owner, as far as this process has it.  Raises nothing; may be repeated."""
        self.__dict__.pop("_content", None)
        if self._is_counted_down:
            return
        self._is_counted_down = True
        handle = self.handle
        with suppress(RuntimeError, WeightSyncError):  # its owner has ended, or this torch knows no CUDA
            handle.check_counter()
            torch.UntypedStorage._release_ipc_counter(handle.counter, handle.counter_offset, device="cuda")

    @cached_property
    def _content(self) -> torch.Tensor:
        handle = self.handle
        handle.check_counter()
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
        self._is_counted_down = True
        opened = content.data_ptr() - handle.offset_bytes
        base, size = allocation_of(opened)
        if content.data_ptr() + handle.nbytes > base + size:
            raise WeightRequestError(
                f"a CUDA handle names bytes {handle.offset_bytes} to {handle.offset_bytes + handle.nbytes} of an "
                f"allocation of {base + size - opened}"
            )
        return content


def allocation_of(address: int) -> tuple[int, int]:
    """Return address and bytes of the allocation on a device that holds `address`.  Raises `TransportError`."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    if found != 0:
        raise TransportError(f"the allocation of the sender's CUDA memory cannot be found: error {found}")
    return base.value, size.value


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

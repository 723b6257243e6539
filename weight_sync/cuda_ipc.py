"""Memory of another process on a CUDA device, by the handle that torch's reductions put into a payload.

A handle opens on the same machine and the same device only, while its owner keeps the memory.  SGLang's clients put the
device's UUID where torch puts its index, as two processes may number devices differently; both are read.

Nothing here runs without a CUDA device: a process that sees none refuses the payload and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weight_sync.errors import TransportError, WeightRequestError


@dataclass(frozen=True)
class CudaHandle:
    """What a pickled CUDA tensor says of the memory that it lives in; `device` is an index or a UUID."""

    device: int | str
    memory: bytes
    nbytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync_required: bool


@dataclass(frozen=True)
class CudaStorage:
    """A `Storage` on a CUDA device; it is opened at the first `read`, which may raise `TransportError`."""

    handle: CudaHandle

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A view of the owner's memory, uint8 on its device."""
        return self._content[start:stop]

    @cached_property
    def _content(self) -> torch.Tensor:
        handle = self.handle
        try:
            return rebuild_cuda_tensor(
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


def require_cuda() -> None:
    """Raises `WeightRequestError` unless this process can use a CUDA device."""
    if not torch.cuda.is_available():
        raise WeightRequestError(
            "the payload holds CUDA IPC handles, and this engine sees no CUDA device; send CPU tensors (sharing "
            "strategy 'file_system', or safetensors)"
        )


def device_index(device: int | str) -> int:
    """This process's index of the device.  Raises `WeightRequestError` for one that it does not see."""
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

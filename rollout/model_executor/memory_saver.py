"""`MemorySaver`: gives the memory of whole groups of tensors back to the system, and keeps their addresses.

The pages inside a storage are discarded by `madvise(MADV_DONTNEED)`: they read as zeros from then on, and take memory
again when they are written.  So kernels, views and loaders that hold an address go on as before.

    release(tag)    content -> [kept copy in an unnamed file] -> zeros, pages returned
    resume(tag)     kept copy -> content, checked; without one the zeros stay
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from rollout.core.errors import LockstepError, StartupError
from rollout.core.io_struct import MemoryTag
from rollout.layers.layer import Layer
from rollout.layers.weight_entry import WeightLayer
from weight_sync.unnamed_file import UnnamedFile

TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)


class KeptCopyError(LockstepError):
    """A copy of released content could not be written, or is not what was written."""


@dataclass(frozen=True)
class _Span:
    """The bytes of one storage."""

    address: int
    nbytes: int

    def buffer(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")


class KeptCopy:
    """The bytes of some storages in an unnamed file of the temporary folder ($TMPDIR), deleted when closed."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        """Raises `KeptCopyError` where they cannot be written."""
        self._spans = spans
        self._file: UnnamedFile | None = None
        try:
            self._file = UnnamedFile("lockstep-weights-")
            self._entries = [self._file.append(span.buffer()) for span in spans]
        except OSError as error:
            self.close()
            raise KeptCopyError(f"no copy of the weights could be kept: {error}") from error

    def restore(self) -> None:
        """Write the bytes back to where they were.  Raises `KeptCopyError`; their contents are undefined then."""
        assert self._file is not None
        try:
            for span, entry in zip(self._spans, self._entries, strict=True):
                self._file.read(entry, span.buffer())
        except OSError as error:
            raise KeptCopyError(f"the kept copy of the weights cannot be read: {error}") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class MemorySaver:
    """`tensors[tag]` is what a tag stands for; a tag without tensors holds no memory here.

    Storages must be private anonymous memory, as torch allocates them on a CPU.  Raises `StartupError` for tensors on
    another device, or on a system without Linux' meaning of `MADV_DONTNEED`.
    """

    def __init__(self, tensors: Mapping[MemoryTag, Sequence[torch.Tensor]]) -> None:
        if any(not tensor.is_cpu for group in tensors.values() for tensor in group):
            raise StartupError("--enable-memory-saver works on a CPU only: start without it, or with --device cpu")
        if sys.platform != "linux":
            raise StartupError(f"--enable-memory-saver works on Linux only, this is {sys.platform}")
        self._tensors = tensors  # keeps the storages alive
        self._spans = {tag: _spans(group) for tag, group in tensors.items()}
        self._copies: dict[MemoryTag, KeptCopy] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def nbytes(self, tag: MemoryTag) -> int:
        """Bytes of the storages of `tag`."""
        return sum(span.nbytes for span in self._spans.get(tag, ()))

    def keep_copy(self, tag: MemoryTag) -> None:
        """Copy the content to a file, for `restore`.  Raises `KeptCopyError`; nothing changed."""
        self.drop_copy(tag)
        self._copies[tag] = KeptCopy(self._spans.get(tag, ()))

    def has_copy(self, tag: MemoryTag) -> bool:
        return tag in self._copies

    def drop_copy(self, tag: MemoryTag) -> None:
        copy = self._copies.pop(tag, None)
        if copy is not None:
            copy.close()

    def restore(self, tag: MemoryTag) -> None:
        """Put the kept copy back, bit for bit.  Raises `KeptCopyError`; the content is lost then."""
        try:
            self._copies[tag].restore()
        finally:
            self.drop_copy(tag)

    def discard(self, tag: MemoryTag) -> None:
        """Everything of `tag` becomes zero, and whole pages go back to the system."""
        for span in self._spans.get(tag, ()):
            self._discard(span)
        trim = getattr(self._libc, "malloc_trim", None)  # glibc's: what was freed meanwhile goes back as well
        if trim is not None:
            trim(0)

    def _discard(self, span: _Span) -> None:
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


def weight_tensors(model: Layer) -> list[torch.Tensor]:
    """Every tensor that holds weights of `model`, each once; not what is computed from its settings."""
    layers = [layer for _, layer in model.named_layers() if isinstance(layer, WeightLayer)]
    held = (value for layer in layers for value in vars(layer).values())
    return list({id(value): value for value in held if isinstance(value, torch.Tensor)}.values())


def _spans(tensors: Sequence[torch.Tensor]) -> list[_Span]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    return [_Span(address, nbytes) for address, nbytes in sizes.items()]

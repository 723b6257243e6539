"""Memory of one process that others on its machine map: of a fixed size, and without a name.

    the owner     memfd_create, allocated, sealed             its address is /proc/PROCESS/fd/DESCRIPTOR
    a reader      opens that, checks file, seals and size, maps it for reading

A mapping of a file that somebody shortens ends the reader with a signal.  A sealed file keeps its size for ever, so
only those are mapped.  There is no name to be left behind: the memory goes with the last process that has it, also
where that is killed.  `/dev/shm` and its size have no part in it.

A reader in another container or on another machine finds no such process, or another file: the number of the file and
the token in it tell.  Linux only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import weakref
from pathlib import Path
from typing import NamedTuple

import torch

from weight_sync.errors import StagingError, TransportError, WeightRequestError
from weight_sync.pages import mapped_file

_NAME = "lockstep_weights"
_LINK = f"/memfd:{_NAME}"
_TOKEN_BYTES = 32
MAX_MAPPED = 2
"""The memory of one sender that a reader keeps: its buckets take turns in two areas."""


class MemoryAddress(NamedTuple):
    """The place of `num_bytes` bytes: an open file of a process, and the number of that file."""

    process: int
    descriptor: int
    inode: int
    num_bytes: int


class SealedMemory:
    """`content`: uint8 [num_bytes], shared with all readers.  It is closed to new readers when this object goes.

    Raises `TransportError` where the system has no such memory, or not as much.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, descriptor)
            os.posix_fallocate(descriptor, 0, num_bytes)  # else a page that the system lacks would end the process
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(descriptor, num_bytes)
        except (AttributeError, OSError) as error:
            raise TransportError(
                f"there is no memory of {num_bytes} bytes that engines could map ({error}); "
                'use smaller buckets, or transport="broadcast"'
            ) from error
        self.content = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address = MemoryAddress(os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes)


class SealedToken:
    """A token in memory of its own: a reader that knows it has mapped this process's memory."""

    def __init__(self) -> None:
        self.text = secrets.token_hex(_TOKEN_BYTES)
        self._memory = SealedMemory(2 * _TOKEN_BYTES)
        self._memory.content.copy_(torch.frombuffer(bytearray(self.text.encode()), dtype=torch.uint8))

    @property
    def address(self) -> MemoryAddress:
        return self._memory.address


def read_token(address: MemoryAddress) -> str:
    """Return the token at an address.  Raises `WeightRequestError` for one that cannot be mapped, or holds none."""
    content = _mapped(address)[: 2 * _TOKEN_BYTES].tolist()
    token = bytes(content).decode("ascii", "replace")
    if len(token) != 2 * _TOKEN_BYTES or not token.isalnum():
        raise WeightRequestError(f"the memory of process {address.process} holds no token")
    return token


class MappedMemories:
    """The memory of one sender: the `MAX_MAPPED` that were used last stay mapped until `close`.

    The sender may let go of them before, or end: their pages stay until then.
    """

    def __init__(self) -> None:
        self._mapped: dict[MemoryAddress, torch.Tensor] = {}  # the one used last comes last

    def content(self, address: MemoryAddress) -> torch.Tensor:
        """Return what is there, uint8 [num_bytes], which must not be written.  Raises `WeightRequestError`."""
        content = self._mapped.pop(address, None)
        if content is None:
            while len(self._mapped) >= MAX_MAPPED:
                self._mapped.pop(next(iter(self._mapped)))
            content = _mapped(address)
        self._mapped[address] = content
        return content

    def close(self) -> None:
        """Let go of all; views that are in use keep theirs."""
        self._mapped.clear()


def _mapped(address: MemoryAddress) -> torch.Tensor:
    """Map an address.  Raises `WeightRequestError` unless it is sealed memory of this size."""
    where = f"the memory of process {address.process}"
    path = Path(f"/proc/{address.process}/fd/{address.descriptor}")
    try:
        if str(path.readlink()).removesuffix(" (deleted)") != _LINK:  # others might act when they are opened
            raise WeightRequestError(f"{where} was not made by a sender")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise WeightRequestError(f"{where} cannot be opened from here: {error.strerror}") from None
    try:
        _check(descriptor, address, where)
        return mapped_file(descriptor, address.num_bytes)
    except StagingError as error:
        raise WeightRequestError(f"{where} cannot be mapped: {error}") from None
    finally:
        os.close(descriptor)


def _check(descriptor: int, address: MemoryAddress, where: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_ino != address.inode:
        raise WeightRequestError(f"{where} is another file than the call names")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WeightRequestError(f"{where} is not sealed, so it may get shorter; it is not mapped")
    if not 0 < address.num_bytes <= status.st_size:
        raise WeightRequestError(f"{where} has {status.st_size} bytes, and the call names {address.num_bytes}")

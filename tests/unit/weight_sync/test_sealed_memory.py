"""Memory of a sender that engines map: what is shared, and what must not be mapped."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from weight_sync import sealed_memory
from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.sealed_memory import (
    MAX_MAPPED,
    MappedMemories,
    MemoryAddress,
    SealedMemory,
    SealedToken,
    read_token,
)


@pytest.fixture
def files() -> Iterator[list[int]]:
    """Descriptors to close."""
    opened: list[int] = []
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def address_of(descriptor: int, num_bytes: int = 64) -> MemoryAddress:
    return MemoryAddress(os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes)


def test_a_reader_sees_what_the_owner_writes_and_maps_it_once() -> None:
    memory, mapped = SealedMemory(10_000), MappedMemories()
    memory.content[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    seen = mapped.content(memory.address)
    assert seen.numel() == 10_000 and seen[:4].tolist() == [1, 2, 3, 0]
    memory.content[3] = 4
    assert seen[3] == 4
    assert mapped.content(memory.address).data_ptr() == seen.data_ptr()
    mapped.close()
    del memory
    assert seen[:4].tolist() == [1, 2, 3, 4], "a view that is in use stays"


def test_nobody_can_shorten_it() -> None:
    memory = SealedMemory(4096)
    for change in (100, 10_000):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.address.descriptor, change)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.address.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_all_of_it_is_allocated_when_it_is_made() -> None:
    """A page that the system lacks later would end the process that touches it."""
    memory = SealedMemory(1 << 20)
    status = os.fstat(memory.address.descriptor)
    assert status.st_blocks * 512 >= 1 << 20


def test_a_reader_keeps_the_last_two() -> None:
    memories, mapped = [SealedMemory(4096) for _ in range(MAX_MAPPED + 1)], MappedMemories()
    views = [mapped.content(memory.address).data_ptr() for memory in memories]
    assert mapped.content(memories[-1].address).data_ptr() == views[-1]
    assert len(mapped._mapped) == MAX_MAPPED
    assert memories[0].address not in mapped._mapped


def test_the_owner_closes_it_to_new_readers_when_it_goes() -> None:
    memory = SealedMemory(4096)
    address = memory.address
    del memory
    gc.collect()
    with pytest.raises(WeightRequestError, match=r"cannot be opened|another file|was not made by a sender"):
        MappedMemories().content(address)


def _unsealed(files: list[int]) -> MemoryAddress:
    files.append(os.memfd_create(sealed_memory._NAME, os.MFD_ALLOW_SEALING))
    os.ftruncate(files[-1], 4096)
    return address_of(files[-1])


def _sealed_against_growth(files: list[int]) -> MemoryAddress:
    address = _unsealed(files)
    fcntl.fcntl(files[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return address


def _of_another_name(files: list[int]) -> MemoryAddress:
    files.append(os.memfd_create("other", os.MFD_ALLOW_SEALING))
    os.ftruncate(files[-1], 4096)
    fcntl.fcntl(files[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return address_of(files[-1])


def _file(files: list[int]) -> MemoryAddress:
    files.append(os.open(__file__, os.O_RDONLY))
    return address_of(files[-1])


def _pipe(files: list[int]) -> MemoryAddress:
    files += os.pipe()
    return address_of(files[-2])


def _of_no_process(files: list[int]) -> MemoryAddress:
    return MemoryAddress(2**31 - 1, 0, 0, 64)


REFUSED: dict[str, tuple[Callable[[list[int]], MemoryAddress], str]] = {
    "unsealed": (_unsealed, "not sealed"),
    "sealed against growth alone": (_sealed_against_growth, "not sealed"),
    "another name": (_of_another_name, "was not made by a sender"),
    "a file": (_file, "was not made by a sender"),
    "a pipe": (_pipe, "was not made by a sender"),
    "no process": (_of_no_process, "cannot be opened from here"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_may_get_shorter_or_is_no_sender_s_is_not_mapped(files: list[int], kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(WeightRequestError, match=message):
        MappedMemories().content(make(files))


@pytest.mark.parametrize("wrong", [{"inode": 1}, {"num_bytes": 4097}, {"num_bytes": 2**47}, {"num_bytes": 0}])
def test_an_address_that_does_not_fit_its_memory_is_refused(wrong: dict[str, int]) -> None:
    memory = SealedMemory(4096)
    with pytest.raises(WeightRequestError, match=r"another file|has 4096 bytes"):
        MappedMemories().content(memory.address._replace(**wrong))
    assert MappedMemories().content(memory.address).numel() == 4096


def test_a_wrong_reader_that_takes_unsealed_memory_would_be_ended_by_it(files: list[int]) -> None:
    """The check of the seals is what stands between a sender that shortens its memory and the engine's end."""
    address = _unsealed(files)
    program = (
        "import os, sys; from weight_sync import sealed_memory as s\n"
        "s._check = lambda *_: None\n"
        f"view = s.MappedMemories().content(s.MemoryAddress(*{tuple(address)!r}))\n"
        f"os.truncate('/proc/{os.getpid()}/fd/{address.descriptor}', 0)\n"
        "int(view[0])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode < 0, ended.stderr.decode()


def test_a_token_is_read_by_who_maps_the_memory() -> None:
    one, other = SealedToken(), SealedToken()
    assert read_token(one.address) == one.text != other.text == read_token(other.address)


def test_memory_without_a_token_has_none_to_read() -> None:
    for memory in (SealedMemory(4096), SealedMemory(8)):
        with pytest.raises(WeightRequestError, match="no token"):
            read_token(memory.address)


@pytest.mark.parametrize("failing", ["memfd_create", "posix_fallocate"])
def test_a_system_without_such_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    gc.collect()  # what earlier tests left must not go in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(TransportError, match=r"No space left on device.*smaller buckets, or transport"):
        SealedMemory(mmap.PAGESIZE)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before

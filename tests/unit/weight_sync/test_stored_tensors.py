"""Tensors of a storage, read a few at once: the same as one by one, and never more at once than the limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync import stored_tensors
from weight_sync.errors import WeightRequestError
from weight_sync.shared_segment import SharedSegment
from weight_sync.stored_tensors import (
    InlineStorage,
    SegmentStorage,
    Storage,
    StoredTensor,
    contiguous_place,
    name_tensor,
    place_tensor,
    read_in_parts,
)

NUM_BYTES = 400
PART_BYTES = 64
CONTENT = bytes(torch.randint(0, 256, (NUM_BYTES,), generator=torch.Generator().manual_seed(0)).tolist())


@dataclass(frozen=True)
class Counted:
    """A storage that notes which bytes are read."""

    inner: Storage
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        self.reads.append((start, stop))
        return self.inner.read(start, stop)


def inline(address: int) -> InlineStorage:
    """Return the content in memory that begins `address` bytes behind a multiple of 8."""
    memory = bytearray(8 + NUM_BYTES)
    room = (address - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 8
    memory[room : room + NUM_BYTES] = CONTENT
    return InlineStorage(memoryview(memory)[room : room + NUM_BYTES])


def plainly_read(stored: StoredTensor, content: bytes) -> torch.Tensor:
    place = stored.place
    begin, end = place.span
    words = torch.tensor(list(content[begin:end]), dtype=torch.uint8).view(place.dtype)
    return words.as_strided(place.shape, place.stride)


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).tolist()


@st.composite
def tensors_of(draw: st.DrawFn, storages: list[Counted]) -> list[StoredTensor]:
    """Draw tensors mostly one behind the other, as transports put them.

    Some have gaps, go backwards, or are strided, empty or misaligned.
    """
    tensors: list[StoredTensor] = []
    end = 0
    for number in range(draw(st.integers(0, 12))):
        storage = storages[draw(st.sampled_from(range(len(storages))))]
        dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.uint8]))
        start = draw(st.sampled_from([end, end, end, end + 1, end + 8, 0]))
        shape = draw(st.sampled_from([(), (0,), (3,), (2, 3), (5, 2), (30,)]))
        if start + torch.Size(shape).numel() * dtype.itemsize > NUM_BYTES:
            continue
        place = contiguous_place(storage, dtype, shape, start)
        if len(shape) == 2 and draw(st.booleans()):
            place = place_tensor(storage, dtype, shape[::-1], (1, shape[1]), 0, start)
        tensors.append(name_tensor(f"t{number}", place))
        end = place.span[1]
    return tensors


@given(st.data(), st.integers(0, 7))
def test_parts_hold_what_each_tensor_is(data: st.DataObject, address: int) -> None:
    shared = SharedMemory(create=True, size=NUM_BYTES)
    try:
        shared.buf[:NUM_BYTES] = CONTENT[::-1]
        storages = [Counted(inline(address)), Counted(SegmentStorage(SharedSegment(shared.name, NUM_BYTES)))]
        tensors = data.draw(tensors_of(storages))
        contents = {id(storages[0]): CONTENT, id(storages[1]): CONTENT[::-1]}
        expected = [(one.meta.name, bits(plainly_read(one, contents[id(one.place.storage)]))) for one in tensors]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stored_tensors, "PART_BYTES", PART_BYTES)
            parts = [[(name, bits(tensor)) for name, tensor in part] for part in read_in_parts(tensors)]
    finally:
        shared.close()
        shared.unlink()
    assert [entry for part in parts for entry in part] == expected
    most = max([PART_BYTES, *(stop - start for start, stop in (tensor.place.span for tensor in tensors))])
    reads = [read for storage in storages for read in storage.reads]
    assert len(reads) == len(parts) <= len(tensors) and all(parts)
    assert all(stop - start <= most for start, stop in reads)


def test_tensors_side_by_side_are_read_together() -> None:
    storage = Counted(inline(0))
    places = [contiguous_place(storage, torch.bfloat16, (4,), 8 * number) for number in range(12)]
    tensors = [name_tensor(f"t{number}", place) for number, place in enumerate(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_tensors, "PART_BYTES", PART_BYTES)
        assert [len(part) for part in read_in_parts(tensors)] == [8, 4]
    assert storage.reads == [(0, 64), (64, 96)]


@pytest.mark.parametrize("start", [-1, NUM_BYTES + 1, 2**60, 1.0])
@pytest.mark.parametrize("shape", [(4,), (0,)])
def test_places_outside_are_refused(shape: tuple[int, ...], start: int) -> None:
    with pytest.raises(WeightRequestError):
        contiguous_place(inline(0), torch.bfloat16, shape, start)


def test_the_last_place_inside() -> None:
    contiguous_place(inline(0), torch.bfloat16, (4,), NUM_BYTES - 8)
    with pytest.raises(WeightRequestError):
        contiguous_place(inline(0), torch.bfloat16, (4,), NUM_BYTES - 7)

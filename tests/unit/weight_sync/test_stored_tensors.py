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
from weight_sync.held_memory import Areas
from weight_sync.shared_segment import SharedSegment
from weight_sync.stored_tensors import (
    InlineStorage,
    SegmentStorage,
    Storage,
    StoredTensor,
    contiguous_place,
    name_tensor,
    parts_of,
    place_tensor,
    storages_of,
)
from weight_sync.tensor_meta import PackedBucket

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

    @property
    def has_views(self) -> bool:
        return self.inner.has_views

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def read(self, start: int, stop: int, room: torch.Tensor | None = None) -> torch.Tensor:
        self.reads.append((start, stop))
        return self.inner.read(start, stop, room)


def read_all(tensors: list[StoredTensor], storages: list[Storage] | None = None) -> list[PackedBucket]:
    """Read all parts, into memory that is not used again."""
    where = storages_of(tensors) if storages is None else storages
    return [part.read(where, Areas()) for part in parts_of(tensors)]


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
            patch.setattr(stored_tensors, "_JOINED_BYTES", data.draw(st.sampled_from([0, 16, PART_BYTES])))
            parts = [[(name, bits(tensor)) for name, tensor in part.named()] for part in read_all(tensors)]
    finally:
        shared.close()
        shared.unlink()
    assert [entry for part in parts for entry in part] == expected
    most = max([PART_BYTES, *(stop - start for start, stop in (tensor.place.span for tensor in tensors))])
    reads = [read for storage in storages for read in storage.reads]
    assert len(parts) <= len(reads) <= len(tensors) and all(parts)
    assert all(stop - start <= most for start, stop in reads)


def in_a_row(storage: Storage, count: int, size: int = 8) -> list[StoredTensor]:
    """Return tensors of `size` bytes, one behind the other."""
    places = [contiguous_place(storage, torch.uint8, (size,), size * number) for number in range(count)]
    return [name_tensor(f"t{number}", place) for number, place in enumerate(places)]


def test_tensors_side_by_side_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Counted(inline(0))
    monkeypatch.setattr(stored_tensors, "PART_BYTES", PART_BYTES)
    assert [len(part.layout.metas) for part in read_all(in_a_row(storage, 12))] == [8, 4]
    assert storage.reads == [(0, 64), (64, 96)]


def test_a_run_of_the_payload_is_not_copied() -> None:
    storage = inline(0)
    (bucket,) = read_all(in_a_row(storage, 12))
    assert bucket.content.data_ptr() == storage.read(0, 1).data_ptr()


def test_short_tensors_of_many_storages_share_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensors, "PART_BYTES", 4 * PART_BYTES)
    tensors = [each for _ in range(10) for each in in_a_row(inline(1), 1)]
    assert [len(part.layout.metas) for part in read_all(tensors)] == [4, 4, 2]


def test_memory_is_used_from_bucket_to_bucket_unless_the_payload_holds_it() -> None:
    memory = Areas()
    tensors = [each for storage in (inline(0), inline(0)) for each in in_a_row(storage, 2)]
    (part,) = parts_of(tensors)
    first, second = (part.read(storages_of(tensors), memory) for _ in range(2))
    assert first.content.data_ptr() == second.content.data_ptr()


def test_a_storage_that_is_shorter_than_the_first_time_is_refused() -> None:
    """The parts of a call are kept, and its storages are others each time."""
    tensors = in_a_row(inline(0), 12)
    assert read_all(tensors, [inline(0)])
    with pytest.raises(WeightRequestError, match="reaches byte 96 of a storage of 95 bytes"):
        read_all(tensors, [InlineStorage(inline(0).data[:95])])


@pytest.mark.parametrize("start", [-1, NUM_BYTES + 1, 2**60, 1.0])
@pytest.mark.parametrize("shape", [(4,), (0,)])
def test_places_outside_are_refused(shape: tuple[int, ...], start: int) -> None:
    with pytest.raises(WeightRequestError):
        contiguous_place(inline(0), torch.bfloat16, shape, start)


def test_the_last_place_inside() -> None:
    contiguous_place(inline(0), torch.bfloat16, (4,), NUM_BYTES - 8)
    with pytest.raises(WeightRequestError):
        contiguous_place(inline(0), torch.bfloat16, (4,), NUM_BYTES - 7)

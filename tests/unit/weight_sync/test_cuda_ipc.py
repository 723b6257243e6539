"""Memory of a colocated trainer by CUDA handle: opened on the right device, and given back exactly once.

torch's part is played on the host: a storage that was opened counts its handle's counter down when it is closed.
"""

from __future__ import annotations

import inspect
import io
import struct
import weakref
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.loopback_updater import new_receiver
from weight_sync import cuda_ipc
from weight_sync.cuda_ipc import CudaStorage, device_index, max_handle_bytes
from weight_sync.errors import TransportError, WeightRequestError, WeightSyncError
from weight_sync.receivers import tensor as tensor_receiver
from weight_sync.receivers.tensor import TensorSource

NUM_TENSORS = 3
NBYTES = 32
_HEADER_BYTES = 64


class Sender:
    """A process that shared tensors; `counters` are 1 for each handle that it gave out."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_HEADER_BYTES + 8 * 10_000))
        self.name = f"/{path.name}"
        self.counters = np.memmap(path, dtype=np.int64, offset=_HEADER_BYTES)
        self.counters[:NUM_TENSORS] = 1
        self.memory = torch.arange(NUM_TENSORS * NBYTES, dtype=torch.uint8)
        self.opened = 0
        self.events: list[bytes] = []
        self.fails_at: int | None = None

    def payload(self, device: int | str = 0, *, in_one_storage: bool = False, memory: bytes = b"h" * 64) -> bytearray:
        """Return the payload as torch's reductions write it: the same names and fifteen arguments in 2.11 and 2.13.

        `in_one_storage`: the tensors are views of one.  `memory`: the handle.
        """
        buffer = io.BytesIO()
        sender = self

        class Pickler(ForkingPickler):
            def reducer_override(self, value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return NotImplemented
                number = int(value)
                place = (NUM_TENSORS * NBYTES, 0) if in_one_storage else (NBYTES, number * NBYTES)
                handle = (memory, *place, False, sender.name.encode(), number, b"%064d" % number, True)
                size = (torch.Size([NBYTES]), (1,), number * NBYTES if in_one_storage else 0)
                return rebuild_cuda_tensor, (torch.Tensor, *size, torch.UntypedStorage, torch.uint8, device, *handle)

        Pickler(buffer).dump([(f"t{number}", torch.tensor(number)) for number in range(NUM_TENSORS)])
        return bytearray(buffer.getvalue())

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        number = arguments[12]
        if self.fails_at == number:
            raise RuntimeError("CUDA error: invalid device context")
        self.opened += 1
        self.events.append(arguments[13])
        content = self.memory[arguments[9] : arguments[9] + arguments[8]].view(-1)
        weakref.finalize(content, self.count_down, arguments[11], number)
        return content

    def count_down(self, name: bytes, number: int, device: Any = None) -> None:
        assert name.decode() == self.name
        self.counters[number] -= 1

    @property
    def left(self) -> list[int]:
        return self.counters[:NUM_TENSORS].tolist()


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    path = Path("/dev/shm/torch_77_16_16")
    made = Sender(path)
    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", made.rebuild)
    monkeypatch.setattr(cuda_ipc, "device_index", lambda device: 0)
    monkeypatch.setattr(cuda_ipc, "allocation_of", lambda address: (address, 1 << 20))
    monkeypatch.setattr(CudaStorage, "device", torch.device("cpu"))
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", made.count_down, raising=False)
    monkeypatch.setattr(tensor_receiver, "require_cuda", lambda: None)
    yield made
    path.unlink()


def play(sender: Sender, end: str) -> None:
    """Play one call, which ends as `end` names: received whole, refused before, given up, or failing at a handle."""
    source = TensorSource(sender.payload(), None, new_receiver())
    with suppress(WeightSyncError):
        source.announce(10 if end == "too_large" else 1 << 20)
        if end == "refused":
            source.refuse("no")
        for part in source.receive() if end not in ("refused", "too_large") else ():
            assert part.content.numel() == (NUM_TENSORS - 1) * 64 + NBYTES
            for number, (name, content) in enumerate(part.named()):
                assert content.tolist() == list(range(number * NBYTES, (number + 1) * NBYTES)), name
            if end == "given_up":
                break
        part = content = None
    source.refuse("the call failed")


@pytest.mark.parametrize("end", ["whole", "refused", "too_large", "given_up", "fails"])
def test_every_handle_is_counted_down_once(sender: Sender, end: str) -> None:
    sender.fails_at = 1 if end == "fails" else None
    play(sender, end)
    assert sender.left == [0] * NUM_TENSORS
    assert sender.opened == {"whole": 3, "given_up": 3, "fails": 1}.get(end, 0)


@pytest.mark.mutant
@pytest.mark.parametrize(("wrong", "end", "left"), [("never", "refused", [1, 1, 1]), ("always", "whole", [-1, -1, -1])])
def test_a_wrong_release_is_noticed(
    sender: Sender, wrong: str, end: str, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = CudaStorage.release

    def other(self: CudaStorage) -> None:
        if wrong == "always":
            self._uncounted.append(self.handle)
            release(self)

    monkeypatch.setattr(CudaStorage, "release", other)
    play(sender, end)
    assert sender.left == left


@pytest.mark.parametrize("end", ["whole", "refused", "given_up", "fails"])
def test_tensors_of_one_storage_are_opened_once(sender: Sender, end: str) -> None:
    """Each has a handle with a counter and an event; the event that was recorded last is waited for."""
    sender.fails_at = NUM_TENSORS - 1 if end == "fails" else None
    source = TensorSource(sender.payload(in_one_storage=True), None, new_receiver())
    source.announce(1 << 20)
    with suppress(WeightSyncError):
        for part in source.receive() if end != "refused" else ():
            assert {name: content.tolist() for name, content in part.named()} == {
                f"t{number}": list(range(number * NBYTES, (number + 1) * NBYTES)) for number in range(NUM_TENSORS)
            }
            if end == "given_up":
                break
    part = None
    source.refuse("the call failed")
    assert sender.left == [0] * NUM_TENSORS
    assert sender.events == ([b"%064d" % (NUM_TENSORS - 1)] if end in ("whole", "given_up") else [])


def in_two_calls(sender: Sender) -> tuple[list[int], list[int]]:
    """Return what two calls see: the sender gives its memory back after the first, and gets other under the handle."""
    seen: list[list[int]] = []
    for value in (1, 2):
        sender.memory = torch.full((NUM_TENSORS * NBYTES,), value, dtype=torch.uint8)
        sender.counters[:NUM_TENSORS] = 1
        source = TensorSource(sender.payload(), None, new_receiver())
        source.announce(1 << 20)
        seen.append([int(content.unique()) for part in source.receive() for _, content in part.named()])
    return seen[0], seen[1]


def test_memory_is_opened_anew_for_each_call(sender: Sender) -> None:
    """A counter of 0 lets the sender free its memory, and a handle of other memory may have the same bytes."""
    assert in_two_calls(sender) == ([1] * NUM_TENSORS, [2] * NUM_TENSORS)
    assert sender.left == [0] * NUM_TENSORS


@pytest.mark.mutant
def test_memory_that_is_kept_from_call_to_call_is_noticed(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, torch.Tensor] = {}

    def read(self: CudaStorage, start: int, stop: int, room: torch.Tensor | None = None) -> torch.Tensor:
        return kept.setdefault(self.handle.place, self._content)[start:stop]

    monkeypatch.setattr(CudaStorage, "read", read)
    assert in_two_calls(sender) == ([1] * NUM_TENSORS, [1] * NUM_TENSORS)


def test_memory_that_cannot_be_opened_is_an_error(sender: Sender) -> None:
    sender.fails_at = 0
    source = TensorSource(sender.payload(), None, new_receiver())
    source.announce(1 << 20)
    with pytest.raises(TransportError, match="cannot be opened"):
        list(source.receive())


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_a_device_is_found_by_its_uuid_whatever_its_number_there(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ["4f6e", "91ab"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    assert device_index(f"{prefix}91ab") == 1
    assert device_index(1) == 1
    for device in (2, f"{prefix}dead"):
        with pytest.raises(WeightRequestError, match=r"does not see|sees 2"):
            device_index(device)


def test_torch_rebuilds_a_tensor_from_these_fifteen_arguments() -> None:
    """`CudaStorage` passes them by position, and `torch_payload` reads them: the same in torch 2.11 and 2.13."""
    expected = (
        *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"),
        *("storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad"),
        *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
    )
    assert tuple(inspect.signature(rebuild_cuda_tensor).parameters) == expected
    assert hasattr(torch.UntypedStorage, "_release_ipc_counter")


# --- bounds of a handle (W16) -----------------------------------------------------------------------------------------


@pytest.fixture
def counters() -> Iterator[str]:
    """A file of counters as torch makes it."""
    path = Path("/dev/shm/torch_1_16_16")
    path.write_bytes(bytes(64 + 8 * 10_000))
    yield f"/{path.name}"
    path.unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"counter_offset": 9_999, "nbytes": 96}, None),
        ({"counter_offset": 10_000}, "names counter 10000 of 10000"),
        ({"counter_offset": 2**47}, "names counter"),
        ({"counter": b"/torch_9_9_9"}, "cannot open shared memory"),
        ({"counter": b"/../etc/passwd"}, "not a name of torch's"),
        ({"nbytes": 97}, "bytes 32 to 129 of an allocation of 128"),
        ({"offset_bytes": 64, "nbytes": 65}, "bytes 64 to 129 of an allocation of 128"),
    ],
)
def test_w16_a_cuda_handle_stays_within_its_counters_and_its_allocation(
    counters: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str | None
) -> None:
    """torch itself checks neither; its part is played on the host, with an allocation of 128 bytes."""
    memory = torch.zeros(4096, dtype=torch.uint8)

    def rebuilt(kind: Any, size: tuple[int, ...], stride: Any, offset: int, *rest: Any) -> torch.Tensor:
        at, counter_offset = rest[5], rest[8]
        assert counter_offset < 10_000, "torch would write outside of its map"
        return memory[at : at + size[0]]

    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", rebuilt)
    monkeypatch.setattr(cuda_ipc, "device_index", lambda device: 0)
    monkeypatch.setattr(cuda_ipc, "allocation_of", lambda address: (address, 128), raising=False)
    fields: dict[str, Any] = {
        "device": 0,
        "memory": b"m" * 64,
        "nbytes": 64,
        "offset_bytes": 32,
        "counter": counters.encode(),
        "counter_offset": 0,
        "event": b"e" * 64,
        "event_sync_required": True,
    }
    storage = cuda_ipc.CudaStorage(cuda_ipc.CudaHandle(**fields | change))
    if reason is None:
        assert storage.read(0, storage.nbytes).numel() == storage.nbytes
    else:
        with pytest.raises(WeightRequestError, match=reason):
            storage.read(0, storage.nbytes)


EXPANDABLE = b"\x02e" + b"m" * 40


@pytest.mark.parametrize(
    ("memory", "num_mapped", "reason"),
    [
        (EXPANDABLE, 3, None),
        (EXPANDABLE, 4, None),
        (EXPANDABLE, 2, "bytes 32 to 300 of an allocation of 256"),
        (b"\x02c" + b"m" * 64, 3, "bytes 32 to 300 of an allocation of 128"),
        (b"me" + b"m" * 62, 3, "bytes 32 to 300 of an allocation of 128"),
    ],
    ids=["just fits", "fits", "too long", "of cudaMalloc", "before torch 2.5"],
)
def test_memory_in_expandable_segments_spans_allocations(
    counters: str, monkeypatch: pytest.MonkeyPatch, memory: bytes, num_mapped: int, reason: str | None
) -> None:
    """Allocations of 128 bytes lie one behind the other; a plain handle names one of them, whatever lies behind it."""
    content = torch.zeros(4096, dtype=torch.uint8)

    def allocation_of(address: int) -> tuple[int, int]:
        number = (address - content.data_ptr()) // 128
        if not 0 <= number < num_mapped:
            raise TransportError("not mapped")
        return content.data_ptr() + 128 * number, 128

    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", lambda *arguments: content[32 : 32 + arguments[8]])
    monkeypatch.setattr(cuda_ipc, "device_index", lambda device: 0)
    monkeypatch.setattr(cuda_ipc, "allocation_of", allocation_of)
    storage = CudaStorage(cuda_ipc.CudaHandle(0, memory, 268, 32, counters.encode(), 0, b"e" * 64, True))
    if reason is None:
        assert storage.read(0, storage.nbytes).numel() == 268
    else:
        with pytest.raises(WeightRequestError, match=reason):
            storage.read(0, storage.nbytes)


def _expandable_handle(start: int, nbytes: int, allocation: int, part: bytes) -> bytes:
    """Return the handle of a block as torch 2.5 to 2.13 write it (`CUDACachingAllocator.cpp`, `shareIpcHandle`)."""
    count = -(-(start + nbytes) // allocation) - start // allocation
    return b"\x02e" + struct.pack("@iQQ", 77, allocation, count) + part * count


@pytest.mark.parametrize("part", [b"fdno", b"f" * 64], ids=["descriptors", "fabric"])
@pytest.mark.parametrize("allocation", [2 << 20, 20 << 20])
@pytest.mark.parametrize("nbytes", [1, 512, 2 << 20, 20 << 20, (1 << 30) + 1, 1_400_000_000, 140 << 30])
def test_handles_of_storages_of_any_size_are_within_the_limit(nbytes: int, allocation: int, part: bytes) -> None:
    for start in (0, 512, allocation - 512):
        assert len(_expandable_handle(start, nbytes, allocation, part)) <= max_handle_bytes(nbytes)


def test_the_limit_of_4096_bytes_refused_handles_that_torch_makes() -> None:
    """It let storages of 1.2 GiB through, in allocations of 20 MiB with handles of the fabric kind."""
    assert len(_expandable_handle(0, 1_400_000_000, 20 << 20, b"f" * 64)) > 4096


def test_a_handle_that_is_too_long_for_its_storage_is_refused(sender: Sender) -> None:
    most = max_handle_bytes(NBYTES)
    TensorSource(sender.payload(memory=b"\x02e" + b"m" * (most - 2)), None, new_receiver()).announce(1 << 20)
    with pytest.raises(WeightRequestError, match="malformed payload: a handle was expected"):
        TensorSource(sender.payload(memory=b"\x02e" + b"m" * (most - 1)), None, new_receiver()).announce(1 << 20)


def test_a_driver_that_answers_with_one_range_for_all_ends_the_walk(
    counters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = torch.zeros(4096, dtype=torch.uint8)
    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", lambda *arguments: content[: arguments[8]])
    monkeypatch.setattr(cuda_ipc, "device_index", lambda device: 0)
    monkeypatch.setattr(cuda_ipc, "allocation_of", lambda address: (content.data_ptr(), 128))
    storage = CudaStorage(cuda_ipc.CudaHandle(0, EXPANDABLE, 268, 0, counters.encode(), 0, b"e" * 64, True))
    with pytest.raises(WeightRequestError, match="bytes 0 to 268 of an allocation of 128"):
        storage.read(0, storage.nbytes)


def test_the_driver_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_driver(name: str) -> Any:
        def find(base: Any, size: Any, address: Any) -> int:
            base._obj.value, size._obj.value = address.value - 16, 4096
            return 0 if address.value else 1

        opened.append(name)
        return SimpleNamespace(cuMemGetAddressRange_v2=find)

    monkeypatch.setattr(cuda_ipc.ctypes, "CDLL", open_driver)
    cuda_ipc._driver.cache_clear()
    try:
        assert [cuda_ipc.allocation_of(address) for address in (1016, 2016)] == [(1000, 4096), (2000, 4096)]
        with pytest.raises(TransportError, match="error 1"):
            cuda_ipc.allocation_of(0)
    finally:
        cuda_ipc._driver.cache_clear()
    assert opened == ["libcuda.so.1"]

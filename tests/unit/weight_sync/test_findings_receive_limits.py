"""Limits on what a payload, a folder or a name may make a receiver do."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from weight_sync import cuda_ipc
from weight_sync.delta.compression import compress
from weight_sync.delta.encoder import DeltaEncoder, EncodedDelta
from weight_sync.delta.frame import DeltaFrame, FrameEntry
from weight_sync.delta.local_checkpoint import pull
from weight_sync.delta.planes import PlaneSizes
from weight_sync.delta.publisher import publish_encoded
from weight_sync.errors import ContentError, WeightRequestError, WeightSyncError
from weight_sync.receivers.safetensors_bytes import SafetensorsSource
from weight_sync.shared_segment import SharedSegment
from weight_sync.tensor_meta import TensorMeta

MANY = 1 << 30

# --- W15: shm_unlink ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["lockstep_findings", "psm_findings"])
def segment(request: pytest.FixtureRequest) -> Iterator[SharedMemory]:
    memory = SharedMemory(request.param, create=True, size=4096)
    yield memory
    memory.close()
    with contextlib.suppress(FileNotFoundError):
        memory.unlink()


def _file(memory: SharedMemory) -> bool:
    return Path("/dev/shm", memory.name).exists()


def test_w15_what_holds_no_safetensors_file_is_not_unlinked(segment: SharedMemory) -> None:
    source = SafetensorsSource(SharedSegment(segment.name, 4096), unlink=True)
    with pytest.raises(WeightRequestError):
        source.announce(MANY)
    source.refuse("refused")
    del source
    assert _file(segment)


def test_w15_only_names_with_our_prefix_are_unlinked(segment: SharedMemory) -> None:
    content = save({"x": torch.ones(3)})
    segment.buf[: len(content)] = content
    source = SafetensorsSource(SharedSegment(segment.name, len(content)), unlink=True)
    if segment.name.startswith("lockstep_"):
        source.announce(MANY)
        list(source.receive())
        assert not _file(segment)
    else:
        with pytest.raises(WeightRequestError, match="begin with 'lockstep_', not 'psm_findings'"):
            source.announce(MANY)
        source.refuse("refused")
        assert _file(segment)


# --- W10: zip bombs in published deltas -------------------------------------------------------------------------------


@contextlib.contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """The block holds no more bytes, arrays and objects of Python than that, at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["stranger", "x"])
def test_w10_a_delta_unpacks_nothing_that_the_base_does_not_have(tmp_path: Path, name: str) -> None:
    """A few kB that unpack to 128 MiB, of a tensor that the model lacks or has smaller: refused unopened."""
    base, source = checkpoint(tmp_path / "base", {"x": torch.ones(8, dtype=torch.bfloat16)}), tmp_path / "source"
    numel = 64 << 20
    entry = FrameEntry(TensorMeta(name, torch.bfloat16, (numel,)), PlaneSizes(0, True, (0, 0, 0, 0, 2 * numel)), 1, 1)
    frame = DeltaFrame((entry,), "0" * 64, "1" * 64, (*[compress(b"")] * 4, compress(bytes(2 * numel))))
    publish_encoded(source, 1, EncodedDelta((frame,), "0" * 64, "1" * 64, 2 * numel, numel, {}))
    assert sum(file.stat().st_size for file in source.rglob("*")) < 64 << 10
    with at_most(32 << 20), pytest.raises(ContentError, match=name):
        pull(tmp_path / "local", base, source, 1, timeout_s=5)


def test_w10_a_chain_is_unpacked_tensor_by_tensor(tmp_path: Path) -> None:
    """Five versions in which all of twelve tensors of 128 KiB change: a few tensors are unpacked at a time."""
    tensors = {f"t{number:02}": torch.zeros(64 << 10, dtype=torch.int16) for number in range(12)}
    base, source = checkpoint(tmp_path / "base", tensors), tmp_path / "source"
    encoder = DeltaEncoder(tensors.items())
    for version in range(1, 6):
        tensors = {name: tensor + version * 257 for name, tensor in tensors.items()}
        delta = encoder.encode(tensors.items())
        publish_encoded(source, version, delta)
        encoder.advance(delta)
    with at_most(4 << 20):
        pull(tmp_path / "local", base, source, 5, timeout_s=5)
    pulled = load_file(tmp_path / "local" / "model.safetensors")
    assert all(torch.equal(pulled[name], tensor) for name, tensor in tensors.items())


def test_w10_planes_are_no_larger_than_their_tensor() -> None:
    """Else the tensor would be written densely."""
    assert PlaneSizes.check(90, False, (90, 12, 0, 0, 0), numel=100, itemsize=2)
    with pytest.raises(ContentError):
        PlaneSizes.check(90, False, (90, 12, 90, 90, 180), numel=100, itemsize=2)


# --- W16: CUDA handles ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", range(60))
def test_w10_a_damaged_frame_is_refused_within_bounds(tmp_path: Path, seed: int) -> None:
    """Any bytes of a published frame changed: what comes of it is the version itself, or nothing."""
    rng = random.Random(seed)
    tensors = {"x": torch.arange(4096, dtype=torch.int16), "y": torch.ones(16)}
    base, source = checkpoint(tmp_path / "base", tensors), tmp_path / "source"
    new = {name: tensor + 1 for name, tensor in tensors.items()}
    file = next(publish_encoded(source, 1, DeltaEncoder(tensors.items()).encode(new.items())).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 2, 8))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    file.write_bytes(content[: rng.choice((len(content), rng.randrange(len(content))))])
    try:
        with at_most(8 << 20):
            pull(tmp_path / "local", base, source, 1, timeout_s=5)
    except WeightSyncError:
        assert not (tmp_path / "local" / "model.safetensors").exists()
    else:
        pulled = load_file(tmp_path / "local" / "model.safetensors")
        assert all(torch.equal(pulled[name], tensor) for name, tensor in new.items())

"""Pages that go back to the system, and copies of their content."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.errors import StartupError
from rollout.layers.layer import Layer
from rollout.memory.memory_saver import KeptCopyError, MemorySaver
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.weight_loading import weight_tensors
from tests.model_zoo import load_tiny, logical_tensors, tiny_checkpoint
from tests.tiers import examples
from weight_sync.tensor_meta import TensorMeta, parts_of

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Play a disk that is full after `num_bytes` bytes, as the system tells it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_goes_back_and_addresses_stay() -> None:
    tensor = torch.empty(64 * MIB, dtype=torch.uint8).fill_(7)
    saver, address, before = MemorySaver({"kv_cache": [tensor[:MIB], tensor]}), tensor.data_ptr(), resident_bytes()
    assert saver.nbytes("kv_cache") == 64 * MIB, "two views of one storage count once"
    saver.discard("kv_cache")
    assert before - resident_bytes() > 63 * MIB
    assert tensor.data_ptr() == address and not tensor.any()
    tensor.fill_(3)
    assert int(tensor.sum(dtype=torch.int64)) == 3 * 64 * MIB


@settings(max_examples=examples(60), deadline=None)
@given(offset=st.integers(0, 9000), nbytes=st.integers(1, 30000))
def test_only_its_own_bytes_are_lost(offset: int, nbytes: int) -> None:
    """A storage lies anywhere among others, whose bytes on the same pages stay."""
    around = torch.full((40000,), 5, dtype=torch.uint8)
    buffer = (ctypes.c_ubyte * nbytes).from_address(around.data_ptr() + offset)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    MemorySaver({"weights": [tensor]}).discard("weights")
    assert not around[offset : offset + nbytes].any()
    assert bool((around[:offset] == 5).all()) and bool((around[offset + nbytes :] == 5).all())


def test_a_kept_copy_comes_back_bit_for_bit() -> None:
    tensors = [torch.randn(1000, 7), torch.randn(3, 5, dtype=torch.bfloat16), torch.empty(0)]
    content = [tensor.clone() for tensor in tensors]
    saver = MemorySaver({"weights": tensors})
    saver.keep_copy("weights")
    saver.discard("weights")
    assert not any(tensor.any() for tensor in tensors)
    assert saver.has_copy("weights")
    saver.restore("weights")
    assert all(torch.equal(*pair) for pair in zip(tensors, content))
    assert saver.has_copy("weights"), "another rank may have failed: the content may have to be restored again"
    saver.drop_copy("weights")
    assert not saver.has_copy("weights")


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_copy_is_noticed(damage: str) -> None:
    saver = MemorySaver({"weights": [torch.randn(1000), torch.randn(1000)]})
    saver.keep_copy("weights")
    copy = saver._copies["weights"]._file
    assert copy is not None
    file = copy._file
    if damage == "flip":
        os.pwrite(file.fileno(), b"\x55", 5001)
    else:
        os.truncate(file.fileno(), 7999)
    with pytest.raises(KeptCopyError):
        saver.restore("weights")
    assert not saver.has_copy("weights")


def test_a_full_disk_is_an_error_and_loses_nothing() -> None:
    tensor = torch.ones(MIB)
    saver = MemorySaver({"weights": [tensor]})
    with files_of_at_most(MIB), pytest.raises(KeptCopyError):
        saver.keep_copy("weights")
    assert bool((tensor == 1).all()) and not saver.has_copy("weights")


def test_other_devices_are_refused_at_start() -> None:
    with pytest.raises(StartupError, match="CPU"):
        MemorySaver({"weights": [torch.empty(3, device="meta")]})


@pytest.mark.parametrize("kind", ["moe_dense_first", "moe", "dense"])
def test_the_weights_are_all_that_a_refresh_writes(tmp_path: Path, kind: str) -> None:
    """Discarded memory is written again through the names of the checkpoint; no other memory may be discarded."""
    torch.set_num_threads(1)
    folder = tiny_checkpoint(tmp_path / kind, kind)
    model, whole = load_tiny(folder, torch.float32), load_tiny(folder, torch.float32)
    MemorySaver({"weights": weight_tensors(model)}).discard("weights")
    assert not any(parts_of(model.weights, name)[0].content.any() for name in model.weights.metas())
    for name, tensor in logical_tensors(folder).items():
        for piece in model.weights.split(TensorMeta(name, tensor.dtype, tuple(tensor.shape))):
            model.weights.write(piece.name, tensor[piece.index])
    assert _bits(model) == _bits(whole)
    assert torch.equal(_angles(model), _angles(whole))


def _angles(model: DecoderForCausalLM) -> torch.Tensor:
    return torch.cat([table.angles(torch.arange(512)) for table in model.model.rotary_tables.values()])


def _bits(model: Layer) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in model.tensors()]

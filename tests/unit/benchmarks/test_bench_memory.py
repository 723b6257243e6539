"""The memory benchmark reads a process, and little stays mapped while a checkpoint is read."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from benchmarks import memory
from rollout.model import load
from rollout.model.load import open_checkpoint, read_tensors
from tests.model_zoo import logical_tensors, tiny_checkpoint

pytestmark = pytest.mark.full

MB = 2**20


def test_memory_that_is_touched_is_resident_and_private() -> None:
    gc.collect()  # so that no memory of other tests is given back in between
    before = memory.read_memory(os.getpid())
    with mmap.mmap(
        -1, 64 * MB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as data:  # new pages, even if the allocator has free ones
        for page in range(0, len(data), mmap.PAGESIZE):  # no large buffer, which the allocator would keep
            data[page] = 1
        after = memory.read_memory(os.getpid())
    assert 60 * MB < after.resident - before.resident < 80 * MB
    assert 60 * MB < after.private - before.private < 80 * MB
    assert after.resident <= after.peak and after.proportional <= after.resident


def test_the_bound_adds_a_margin_to_weights_and_kv_pool() -> None:
    assert memory.bound_bytes(weights=1000, kv_pool=10) == 1150 + 10 + 400e6


def test_the_worker_is_distinguished_from_other_children() -> None:
    with pytest.raises(ValueError):
        memory.worker_pid(os.getpid())


def mapped_while_reading(folder: Path) -> int:
    """Read and touch every tensor; return the largest number of bytes of files that became resident meanwhile."""
    start = memory.read_memory(os.getpid()).mapped
    most = 0
    (shard,) = open_checkpoint(folder)
    for _, tensor in read_tensors(shard):
        tensor.sum()
        most = max(most, memory.read_memory(os.getpid()).mapped - start)
    return most


def test_what_was_read_of_a_file_does_not_stay_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe", hidden_size=512, moe_intermediate_size=256, vocab_size=4000)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 30 * MB
    monkeypatch.setattr(load, "MAPPED_BYTES", size)
    assert mapped_while_reading(folder) > 0.8 * size
    monkeypatch.setattr(load, "MAPPED_BYTES", size // 8)
    assert mapped_while_reading(folder) < 0.6 * size


def test_tensors_are_the_same_however_often_the_mapping_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    (shard,) = open_checkpoint(folder)
    expected = logical_tensors(folder)
    for limit in (1, 10_000, 10**9):
        monkeypatch.setattr(load, "MAPPED_BYTES", limit)
        found = {name: tensor.clone() for name, tensor in read_tensors(shard)}
        assert list(found) == [meta.name for meta in shard.metas]
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

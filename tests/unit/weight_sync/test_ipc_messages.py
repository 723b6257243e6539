"""Readers of checkpoint-engine's messages, under any and under mutated bytes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ipc_wire import cuda_handle, entry
from tests.logical_weights_fake import EMBED, NORM
from tests.tiers import examples
from weight_sync.errors import WeightRequestError
from weight_sync.held_memory import Areas
from weight_sync.ipc_messages import IpcBuffer, read_bucket, read_end, read_handle
from weight_sync.shared_segment import SharedSegment
from weight_sync.stored_tensors import SegmentStorage, StoredTensor, parts_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IpcBuffer]:
    path = Path(f"/dev/shm/lockstep-ipc-test-{os.getpid()}")
    path.write_bytes(bytes(2048))
    yield IpcBuffer(SegmentStorage(SharedSegment(path.name, 2048)), 0, 2048)
    path.unlink()


def content_of(stored: StoredTensor) -> torch.Tensor:
    (part,) = parts_of([stored])
    ((_, tensor),) = part.read([stored.place.storage], Areas()).named()
    return tensor


def read_all(data: bytes, buffer: IpcBuffer) -> None:
    """Read messages, which may raise nothing but refusals, and check that accepted tensors are readable."""
    for read in (lambda: read_handle(memoryview(data), CPU), lambda: read_bucket(memoryview(data), buffer)):
        try:
            value = read()
        except WeightRequestError:
            continue
        for tensor in value if isinstance(value, list) else ():
            assert content_of(tensor).numel() == tensor.meta.numel
    read_end(memoryview(data))


@settings(max_examples=examples(300), deadline=None)
@given(data=st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda data: b"\x80\x05" + data)))
def test_any_bytes_are_read_or_refused(buffer: IpcBuffer, data: bytes) -> None:
    read_all(data, buffer)


VALID = [
    cuda_handle(),
    pickle.dumps([entry(), entry(name=EMBED, dtype=torch.bfloat16, shape=torch.Size([6, 4]), offset=256)], -1),
    pickle.dumps(RuntimeError("Some workers failed to update weights"), -1),
    json.dumps([{"name": NORM, "dtype": "float32", "shape": [4], "offset": 0}]).encode(),
    b'{"shm_name": "x", "nbytes": 8}',
]


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(data=st.data())
def test_mutated_messages_are_read_or_refused(buffer: IpcBuffer, data: st.DataObject) -> None:
    message = bytearray(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        kind = data.draw(st.sampled_from(["flip", "drop", "insert", "cut"]))
        if kind == "flip":
            message[at] = data.draw(st.integers(0, 255))
        elif kind == "drop" and len(message) > 1:
            del message[at]
        elif kind == "insert":
            message[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del message[max(at, 1) :]
    read_all(bytes(message), buffer)


@settings(max_examples=examples(200), deadline=None)
@given(
    entries=st.lists(
        st.fixed_dictionaries(
            {
                "name": st.text(max_size=4),
                "dtype": st.sampled_from(["uint8", "bfloat16", "float32", "float64", "nope", "torch.int8"]),
                "shape": st.lists(st.integers(-2, 2**62) | st.integers(0, 64), max_size=3),
                "offset": st.integers(-8, 4096) | st.integers(),
            }
        ),
        max_size=3,
    )
)
def test_whatever_a_bucket_says_no_byte_outside_the_buffer_is_read(buffer: IpcBuffer, entries: list[Any]) -> None:
    try:
        tensors = read_bucket(memoryview(json.dumps(entries).encode()), buffer)
    except WeightRequestError:
        return
    assert isinstance(tensors, list)
    for tensor, said in zip(tensors, entries, strict=True):
        assert said["offset"] >= 0 and said["offset"] + tensor.meta.nbytes <= 2048
        assert said["offset"] % tensor.meta.dtype.itemsize == 0
        assert content_of(tensor).nbytes == tensor.meta.nbytes

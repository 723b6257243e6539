"""Safetensors in memory: what the package writes is read, what it refuses is refused, shared memory is left alone."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from tests.logical_weights_fake import FakeWeights, bits, version
from tests.loopback_updater import content_of, new_receiver
from tests.tiers import examples
from weight_sync.errors import ContentError, WeightRequestError
from weight_sync.receivers.base import Receiver
from weight_sync.receivers.tensor import MAX_HEADER_BYTES, SafetensorsSource
from weight_sync.shared_segment import SharedSegment
from weight_sync.tensor_meta import DTYPES
from weight_sync.updater import WeightUpdater

MANY = 1 << 30
SENT = version(1)
FILE = save(SENT)


def source_of(content: bytes | SharedSegment, *, unlink: bool = False) -> SafetensorsSource:
    held = content if isinstance(content, SharedSegment) else bytearray(content)
    return SafetensorsSource(held, new_receiver(), unlink=unlink)


def received(content: bytes | SharedSegment) -> dict[str, torch.Tensor]:
    return content_of(source_of(content))


def same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {name: bits(tensor) for name, tensor in tensors.items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }


def with_header(header: Any, content: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def test_every_dtype_survives_safetensors() -> None:
    tensors = {name: (torch.arange(6) % 2).to(dtype).view(2, 3) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    same(received(save(tensors, {"format": "pt"})), tensors)
    assert received(save({})) == {}


def test_content_is_not_copied_while_it_is_in_the_call() -> None:
    content = bytearray(FILE)
    source = SafetensorsSource(content, new_receiver())
    source.announce(MANY)
    tensors = [tensor for _, tensor in next(source.receive()).named()]
    before = [bits(tensor) for tensor in tensors]
    for position in range(len(content)):
        content[position] ^= 0xFF
    assert tensors and all(bits(tensor) != old for tensor, old in zip(tensors, before, strict=True))


def test_an_update_through_the_updater() -> None:
    weights = FakeWeights()
    updater = WeightUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine)
    updater.begin()
    updater.receive(SafetensorsSource(bytearray(FILE), updater.receiver), "v1")
    updater.verify()
    updater.commit()
    assert weights.snapshot() == FakeWeights(1).snapshot()


# --- right and wrong files, judged by the package too --------------------------------------------------------------


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


WRONG = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "a header beyond the end": struct.pack("<Q", 9) + b"{}",
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "not JSON": with_header(b"{'a'}"),
    "not UTF-8": with_header(b'{"\xff": 1}'),
    "not an object": with_header(b"[]"),
    "nested deeply": with_header(b"[" * 100_000),
    "an entry that is a number": with_header({"a": 1}),
    "no dtype": with_header({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "an unknown dtype": with_header({"a": entry("F7")}, bytes(8)),
    "no shape": with_header({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "a negative size": with_header({"a": entry(shape=[-2])}, bytes(8)),
    "a fractional size": with_header({"a": entry(shape=[2.0])}, bytes(8)),
    "no offsets": with_header({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "three offsets": with_header({"a": entry(offsets=[0, 4, 8])}, bytes(8)),
    "offsets the wrong way round": with_header({"a": entry(offsets=[8, 0])}, bytes(8)),
    "too few bytes for the shape": with_header({"a": entry(shape=[3])}, bytes(8)),
    "a shape that overflows": with_header({"a": entry(shape=[2**40, 2**40])}, bytes(8)),
    "content that is short": with_header({"a": entry()}, bytes(7)),
    "content that is long": with_header({"a": entry()}, bytes(9)),
    "a gap": with_header({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
    "an overlap": with_header({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
    "a gap at the front": with_header({"a": entry(offsets=[4, 12])}, bytes(12)),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_files_are_refused_as_the_package_refuses_them(name: str) -> None:
    with pytest.raises((safetensors.SafetensorError, UnicodeDecodeError)):
        safetensors.deserialize(WRONG[name])
    with pytest.raises(WeightRequestError):
        received(WRONG[name])


STRICTER = {
    "a name twice": with_header(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "a name that no tensor has": with_header({"a\n": entry()}, bytes(8)),
    "an empty name": with_header({"": entry()}, bytes(8)),
    "half a character": with_header(b'{"\\ud800": %s}' % json.dumps(entry()).encode(), bytes(8)),
    "nine dimensions": with_header({"a": entry(shape=[2] + [1] * 8)}, bytes(8)),
    "a dtype that no model has": with_header({"a": entry("C64", [1])}, bytes(8)),
}


@pytest.mark.parametrize("name", list(STRICTER))
def test_what_the_package_would_take_and_we_do_not(name: str) -> None:
    with pytest.raises(WeightRequestError) as caught:
        received(STRICTER[name])
    str(caught.value).encode()


def test_the_cap_on_the_header() -> None:
    text = b"{}" + b" " * MAX_HEADER_BYTES
    with pytest.raises(WeightRequestError, match="a header of"):
        received(struct.pack("<Q", len(text)) + text)


def test_the_cap_on_the_content() -> None:
    total = sum(tensor.nbytes for tensor in SENT.values())
    source_of(FILE).announce(total)
    with pytest.raises(WeightRequestError, match=f"has {total} bytes of tensors; the limit is {total - 1}"):
        source_of(FILE).announce(total - 1)


edits = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "insert"]), st.floats(0, 1), st.binary(min_size=1, max_size=5)),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def warm() -> Receiver:
    """A receiver that knows `FILE`."""
    receiver = new_receiver(100)
    content_of(SafetensorsSource(bytearray(FILE), receiver))
    return receiver


@settings(max_examples=examples(400), deadline=None)
@given(edits, st.floats(0.05, 1))
def test_damaged_files_agree_with_the_package(
    warm: Receiver, changes: list[tuple[str, float, bytes]], reach: float
) -> None:
    """A damaged file is refused, or gives the tensors that the package reads of it; so where others are known."""
    content = bytearray(FILE)
    for kind, place, new in changes:
        at = int(place * reach * len(content))
        if kind == "cut":
            del content[at : at + len(new)]
        elif kind == "insert":
            content[at:at] = new
        else:
            content[at : at + len(new)] = new
    try:
        tensors = received(bytes(content))
    except WeightRequestError:
        with pytest.raises(WeightRequestError):
            content_of(SafetensorsSource(content, warm))
        return
    same(tensors, load(bytes(content)))
    same(content_of(SafetensorsSource(content, warm)), tensors)


# --- shared memory ------------------------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    memory = SharedMemory(f"lockstep_{os.getpid()}", create=True, size=len(FILE))
    memory.buf[:] = FILE
    yield memory
    memory.close()
    with contextlib.suppress(FileNotFoundError):
        memory.unlink()


def is_there(memory: SharedMemory) -> bool:
    try:
        SharedSegment(memory.name, 1).check()
    except WeightRequestError:
        return False
    return True


def test_a_segment_is_read_and_left(shared: SharedMemory) -> None:
    for name in (shared.name, "/" + shared.name):
        same(received(SharedSegment(name, len(FILE))), SENT)
    assert bytes(shared.buf) == FILE
    assert is_there(shared)


def test_a_segment_larger_than_its_file(shared: SharedMemory) -> None:
    with pytest.raises(WeightRequestError, match=rf"has {len(FILE)} bytes, but the call needs {len(FILE) + 1}"):
        received(SharedSegment(shared.name, len(FILE) + 1))
    with pytest.raises(WeightRequestError, match="its header describes"):
        received(SharedSegment(shared.name, len(FILE) - 1))


@pytest.mark.parametrize("outcome", ["read", "refused", "dropped", "half read"])
def test_a_segment_is_unlinked_if_asked(shared: SharedMemory, outcome: str) -> None:
    source = source_of(SharedSegment(shared.name, len(FILE)), unlink=True)
    if outcome == "refused":
        with pytest.raises(WeightRequestError):
            source.announce(1)
    else:
        source.announce(MANY)
        assert is_there(shared)
        if outcome == "read":
            list(source.receive())
        elif outcome == "half read":
            buckets = source.receive()
            next(buckets)
            buckets.close()  # type: ignore[attr-defined]
        else:
            del source
    assert not is_there(shared)


def test_a_segment_that_ends_early(shared: SharedMemory) -> None:
    source = source_of(SharedSegment(shared.name, len(FILE)))
    source.announce(MANY)
    with open(f"/dev/shm/{shared.name}", "r+b") as file:
        file.truncate(len(FILE) - 1)
    with pytest.raises(ContentError, match="ends at byte"):
        list(source.receive())


def test_a_segment_that_is_not_there() -> None:
    with pytest.raises(WeightRequestError, match="cannot open shared memory 'psm_none'"):
        received(SharedSegment("psm_none", 8))


# --- which segments are unlinked (W15) --------------------------------------------------------------------------------


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
    source = source_of(SharedSegment(segment.name, 4096), unlink=True)
    with pytest.raises(WeightRequestError):
        source.announce(MANY)
    source.refuse("refused")
    del source
    assert _file(segment)


def test_w15_only_names_with_our_prefix_are_unlinked(segment: SharedMemory) -> None:
    content = save({"x": torch.ones(3)})
    segment.buf[: len(content)] = content
    source = source_of(SharedSegment(segment.name, len(content)), unlink=True)
    if segment.name.startswith("lockstep_"):
        source.announce(MANY)
        list(source.receive())
        assert not _file(segment)
    else:
        with pytest.raises(WeightRequestError, match="begins with 'lockstep_', got 'psm_findings'"):
            source.announce(MANY)
        source.refuse("refused")
        assert _file(segment)

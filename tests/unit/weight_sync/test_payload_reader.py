"""The reader of pickles: plain values come back, nothing runs, nothing takes memory or time beyond the caps."""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from weight_sync.errors import WeightRequestError
from weight_sync.payload_reader import Budget, Function, PayloadReader, Record, RecordType
from weight_sync.torch_payload import TorchPayload

HEADER = b"\x80\x04"


def read(data: bytes, admitted: dict | None = None, instructions: int = 100_000) -> Any:
    return PayloadReader(memoryview(bytearray(data)), admitted or {}, Budget(instructions)).read()


def plain(value: Any) -> Any:
    """Return the value with views of the payload turned into bytes."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**120), 2**120) | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values, st.sampled_from([3, 4, 5]))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert plain(read(data)) == value
    assert plain(read(pickle._dumps(value, protocol))) == value  # type: ignore[attr-defined]


def test_shared_values_stay_shared_and_bytes_are_views() -> None:
    inner = [1]
    data = bytearray(pickle.dumps([inner, inner, b"content"], 4))
    first, second, content = PayloadReader(memoryview(data), {}, Budget(100)).read()
    assert first is second
    assert isinstance(content, memoryview)
    data[data.index(b"content")] = ord("C")
    assert bytes(content) == b"Content"


def test_one_pickle_after_another() -> None:
    data = pickle.dumps(1) + pickle.dumps("two") + b"rest"
    reader = PayloadReader(memoryview(data), {}, Budget(100))
    assert (reader.read(), reader.read()) == (1, "two")
    assert data[reader.position :] == b"rest"


# --- nothing runs -------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def live_gadgets(target: str) -> dict[str, bytes]:
    """Return pickles that make the folder `target` when Python's own reader loads them."""
    code = f"__import__('os').mkdir({target!r})"
    inner = HEADER + b"cposix\nmkdir\n" + text(target) + b"\x85R."
    return {
        "reduce of os": HEADER + b"cos\nmkdir\n" + text(target) + b"\x85R.",
        "reduce of posix": inner,
        "eval": HEADER + b"cbuiltins\neval\n" + text(code) + b"\x85R.",
        "exec": HEADER + b"cbuiltins\nexec\n" + text(code) + b"\x85R.",
        "system": HEADER + b"cos\nsystem\n" + text(f"mkdir {target}") + b"\x85R.",
        "subprocess": HEADER + b"csubprocess\ncheck_call\n" + b"](" + text("mkdir") + text(target) + b"e\x85R.",
        "stack global": HEADER + text("os") + text("mkdir") + b"\x93" + text(target) + b"\x85R.",
        "dotted name": HEADER + text("torch") + text("serialization.os.mkdir") + b"\x93" + text(target) + b"\x85R.",
        "getattr": HEADER
        + (b"cbuiltins\ngetattr\n" + b"cbuiltins\n__import__\n" + text("os") + b"\x85R" + text("mkdir") + b"\x86R")
        + (text(target) + b"\x85R."),
        "inst": HEADER + b"(" + text(target) + b"ios\nmkdir\n.",
        "obj": HEADER + b"(cos\nmkdir\n" + text(target) + b"o.",
        "extension code": HEADER + b"\x82\xf0" + text(target) + b"\x85R.",
        "long extension code": HEADER + b"\x84\xf0\x00\x00\x00" + text(target) + b"\x85R.",
        "old protocol": b"cos\nmkdir\n" + text(target) + b"\x85R.",
        "partial": HEADER + b"cfunctools\npartial\ncos\nmkdir\n" + text(target) + b"\x86R)R.",
        "torch.load inside": HEADER
        + (b"ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", len(inner)) + inner + b"\x85R."),
        "inside a nested pickle": HEADER + (b"c_pickle\nloads\nB" + struct.pack("<I", len(inner)) + inner + b"\x85R."),
        "in an argument": HEADER + b"ctorch\nSize\n((cos\nmkdir\n" + text(target) + b"\x85Rtt\x85R.",
        "after a value": HEADER + b"]cos\nmkdir\n" + text(target) + b"\x85Ra.",
        "build of a function": HEADER + (b"cbuiltins\nprint\ncos\nmkdir\n" + text(target) + b"\x85Rb."),
    }


GADGETS = list(live_gadgets(""))


@pytest.fixture
def extension() -> Iterator[None]:
    copyreg.add_extension("os", "mkdir", 0xF0)
    yield
    copyreg.remove_extension("os", "mkdir", 0xF0)


def stock(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 - the gadgets of this file, which make a folder


def ours(data: bytes) -> Any:
    return TorchPayload().read(memoryview(bytearray(data)))


def fires(reader: Callable[[bytes], Any], gadget: bytes, target: Path) -> bool:
    try:
        reader(gadget)
    except Exception as error:
        assert reader is stock or isinstance(error, WeightRequestError), error
    else:
        assert reader is stock, "the gadget was read"
    return target.exists()


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("name", GADGETS)
def test_a_gadget_is_refused_and_does_nothing(name: str, tmp_path: Path) -> None:
    target = tmp_path / "made"
    gadget = live_gadgets(str(target))[name]
    assert not fires(ours, gadget, target)
    assert fires(stock, gadget, target), "the gadget would not fire in Python's own reader either"


METADATA = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n"

REFUSED = {
    "not a pickle": b"hello",
    "nothing": b"",
    "protocol 1": b"\x80\x01N.",
    "protocol 6": b"\x80\x06N.",
    "no end": HEADER + b"N",
    "nothing at its end": HEADER + b".",
    "two values at its end": HEADER + b"NN.",
    "an open mark": HEADER + b"(N.",
    "a mark without one": HEADER + b"t.",
    "a module's name without an end": HEADER + b"ctorch",
    "a call of a value": HEADER + b"N)R.",
    "a call of a dtype": HEADER + b"ctorch\nfloat32\n)R.",
    "a call of a class": HEADER + b"ctorch.nn.parameter\nParameter\n)R.",
    "a call of a call": HEADER + b"ctorch\nSize\n)\x85R)R.",
    "a call without a tuple": HEADER + b"ctorch\nSize\n]R.",
    "too many arguments": HEADER + b"ctorch\nSize\n))\x86R.",
    "nested arguments": HEADER + b"ctorch._utils\n_rebuild_tensor_v2\n(" + b")\x85" * 7 + b"tR.",
    "an object of a function": HEADER + b"ctorch\nSize\n)\x81.",
    "an object of a dtype": HEADER + b"ctorch\nfloat32\n)\x81.",
    "an object with arguments": HEADER + METADATA + b"N\x85\x81.",
    "newobj_ex": HEADER + METADATA + b")}\x92.",
    "build with a class": HEADER + METADATA + b")\x81}" + text("__class__") + b"Nsb.",
    "build with a setstate": HEADER + METADATA + b")\x81}" + text("__setstate__") + b"Nsb.",
    "build with a pair": HEADER + METADATA + b")\x81N}" + text("name") + b"Ns\x86b.",
    "build twice": HEADER + METADATA + b")\x81}b}b.",
    "build of a list": HEADER + b"]}b.",
    "build of a tensor class": HEADER + b"ctorch\nTensor\n}b.",
    "build of a storage class": HEADER + b"ctorch.storage\nUntypedStorage\n}b.",
    "a key that is a tuple": HEADER + b"})Ns.",
    "an odd dict": HEADER + b"}(Nu.",
    "an append to a tuple": HEADER + b")Na.",
    "an append to nothing": HEADER + b"Na.",
    "an item of a list": HEADER + b"]" + text("k") + b"Ns.",
    "a memo that is not there": HEADER + b"h\x05.",
    "a persistent id": HEADER + b"NQ.",
    "a text persistent id": HEADER + b"Pkey\n.",
    "duplicate": HEADER + b"N2.",
    "a float": HEADER + b"G" + bytes(8) + b".",
    "a set": HEADER + b"\x8f.",
    "a bytearray": HEADER + b"\x96" + bytes(8) + b".",
    "an out-of-band buffer": HEADER + b"\x97.",
    "a huge whole number": HEADER + b"\x8a\x11" + bytes(17) + b".",
    "a long whole number": HEADER + b"\x8b\x01\x00\x00\x00\x01.",
    "text that is not UTF-8": HEADER + b"\x8c\x01\xff.",
    "a name that is not ASCII": HEADER + b"c\xff\nx\n.",
    "a name of numbers": HEADER + b"K\x01K\x02\x93.",
    "a frame beyond the end": HEADER + b"\x95" + struct.pack("<Q", 2**63) + b"N.",
    "bytes behind": HEADER + b"N.N",
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_malformed_pickles_are_refused(name: str) -> None:
    with pytest.raises(WeightRequestError):
        ours(REFUSED[name])


def test_functions_are_called_only_with_what_the_payload_says() -> None:
    calls: list[tuple] = []
    admitted = {("m", "f"): Function(lambda *arguments: calls.append(arguments))}
    read(HEADER + b"cm\nf\nK\x01K\x02\x86R.", admitted)
    assert calls == [(1, 2)]
    with pytest.raises(WeightRequestError, match=r"'m\.g', which is not allowed"):
        read(HEADER + b"cm\ng\n)R.", admitted)


def test_records_take_their_fields_once() -> None:
    kind = RecordType("Thing", frozenset({"a", "b"}))
    admitted = {("m", "Thing"): kind}
    record = read(HEADER + b"cm\nThing\n)\x81}" + text("a") + b"K\x07sb.", admitted)
    assert record == Record(kind, {"a": 7})
    with pytest.raises(WeightRequestError, match="sets unknown fields of a Thing"):
        read(HEADER + b"cm\nThing\n)\x81}" + text("c") + b"K\x07sb.", admitted)


# --- nothing grows ------------------------------------------------------------------------------------------------

BOMBS = {
    "bytes": b"\x8e" + struct.pack("<Q", 2**62),
    "text": b"\x8d" + struct.pack("<Q", 2**62),
    "long": b"\x8b" + struct.pack("<I", 2**31 - 1),
    "bytearray": b"\x96" + struct.pack("<Q", 2**40),
    "memo": b"Nr" + struct.pack("<I", 2**32 - 1) + b"0",
    "frame": b"\x95" + struct.pack("<Q", 2**62),
    "marks": b"(" * 100_000,
    "lists": b"]" * 100_001,
    "deep tuple": b")" + b"\x85" * 99_990 + b".",
    "deep list": b"]" + b"]" * 49_000 + b"a" * 49_000 + b".",
    "doubling": b"]q\x00" + b"(h\x00h\x00e" * 20_000 + b".",
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_bomb_takes_no_more_than_the_payload(name: str) -> None:
    data = bytearray(HEADER + BOMBS[name])
    tracemalloc.start()
    started = time.monotonic()
    with contextlib.suppress(WeightRequestError):
        PayloadReader(memoryview(data), {}, Budget(100_000)).read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 << 20
    assert time.monotonic() - started < 10


def test_the_budget_is_shared_by_nested_pickles() -> None:
    """An inner payload that is named several times counts each time."""
    payload = TorchPayload(max_instructions=1000)
    inner = memoryview(pickle.dumps([None] * 300, 4))
    for _ in range(3):
        payload.read(inner)
    with pytest.raises(WeightRequestError, match="smaller buckets"):
        payload.read(inner)


# --- fuzz ---------------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [bytes([code]) for code in b"(NJKMXCB]})taesuqrhjcRbQ.\x81\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x93\x94\x95"]
    + [text(word) for word in ("torch", "Size", "name", "values")]
    + [b"ctorch\nSize\n", METADATA, b"ctorch._utils\n_rebuild_tensor_v2\n", b"K\x01", b"M\x00\x01"]
    + [b"ctorch.multiprocessing.reductions\nrebuild_storage_filename\n", b"ctorch.storage\nUntypedStorage\n"]
    + [b"ctorch.storage\n_load_from_bytes\n", b"ctorch\nbfloat16\n", b"C\x04abcd"]
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(PIECES, max_size=60))
def test_random_programs_raise_nothing_else(pieces: list[bytes]) -> None:
    with contextlib.suppress(WeightRequestError):
        ours(HEADER + b"".join(pieces) + b".")


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    with contextlib.suppress(WeightRequestError):
        ours(HEADER + data)


def test_torch_pickles_as_python_writes_them() -> None:
    """An admitted value is admitted under every protocol in use."""
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    for protocol in (2, 3, 4, 5):
        buffer = io.BytesIO()
        pickle.Pickler(buffer, protocol).dump([("a", tensor.dtype), ("b", tensor.shape)])
        assert ours(buffer.getvalue()) == [("a", torch.float32), ("b", (2, 3))]

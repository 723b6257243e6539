"""Payloads of tensors: every form that clients send, bounds, shared memory and its count of holders, damage."""

from __future__ import annotations

import base64
import contextlib
import gc
import io
import os
import pickle
import struct
import uuid
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.logical_weights_fake import EMBED, NORM, FakeWeights, bits, version
from tests.loopback_updater import content_of, new_receiver
from tests.sglang_payloads import (
    BUCKET_MODULES,
    LOCAL_MODULES,
    FlattenedTensorBucket,
    FlattenedTensorMetadata,
    LocalSerializedTensor,
    classes_in,
    flattened,
    forking_pickle,
)
from tests.tensor_sender import TensorSender
from tests.tiers import examples
from weight_sync.errors import ContentError, WeightRequestError
from weight_sync.receivers.base import Receiver
from weight_sync.receivers.tensor import TensorSource
from weight_sync.shared_segment import SharedSegment, release_torch_shared_file, torch_shared_file
from weight_sync.stored_tensors import InlineStorage, place_tensor
from weight_sync.tensor_meta import DTYPES
from weight_sync.updater import WeightUpdater

MANY = 1 << 30
NAMED = list(version(1).items())


@pytest.fixture(autouse=True)
def shared_by_name() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def source_of(payload: bytes, load_format: str | None = None, **ranks: int) -> TensorSource:
    return TensorSource(bytearray(payload), load_format, new_receiver(), **ranks)


def received(payload: bytes, load_format: str | None = None, **ranks: int) -> dict[str, torch.Tensor]:
    return content_of(source_of(payload, load_format, **ranks))


def same(tensors: dict[str, torch.Tensor], named: list[tuple[str, torch.Tensor]]) -> None:
    assert list(tensors) == [name for name, _ in named]
    for name, tensor in named:
        assert tensors[name].dtype is tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert bits(tensors[name]) == bits(tensor)


def refusal(payload: bytes, load_format: str | None = None) -> str:
    with pytest.raises(WeightRequestError) as caught:
        received(payload, load_format)
    return str(caught.value)


# --- forms --------------------------------------------------------------------------------------------------------


def test_a_list_of_tensors() -> None:
    same(received(forking_pickle(NAMED)), NAMED)


def test_plain_pickles_of_every_dtype() -> None:
    """The pickle holds the tensors at any alignment, and also parameters and views of one storage."""
    named: list[tuple[str, torch.Tensor]] = []
    for name, dtype in DTYPES.items():
        named.append((name, (torch.arange(5) % 2).to(dtype)))
        named.append((f"{name}.odd"[: 5 + len(named)], torch.ones(3, 1, dtype=dtype)))
    same(received(pickle.dumps(named)), named)
    base = torch.randn(6, 4)
    views = [("parameter", torch.nn.Parameter(base)), ("transposed", base.t()), ("rows", base[2:4])]
    same(received(pickle.dumps(views)), [(name, tensor.detach()) for name, tensor in views])
    same(received(forking_pickle(views)), [(name, tensor.detach()) for name, tensor in views])


def test_shared_tensors_of_every_dtype_and_stride() -> None:
    base = torch.arange(24).view(4, 6)
    named = [(name, base.to(dtype)) for name, dtype in DTYPES.items()]
    named += [
        ("column", base[:, 2]),
        ("transposed", base.t()),
        ("expanded", base[:1].expand(3, 6)),
        ("scalar", base.sum()),
    ]
    named += [("empty", torch.empty(0, 3))]
    same(received(forking_pickle(named)), named)


@pytest.mark.parametrize("module", BUCKET_MODULES)
def test_a_flattened_bucket_is_received_whole(module: str) -> None:
    with classes_in(module):
        same(received(forking_pickle(flattened(NAMED)), "flattened_bucket"), NAMED)
        same(received(pickle.dumps(flattened(NAMED)), "flattened_bucket"), NAMED)


def test_a_flattened_bucket_as_an_object() -> None:
    with classes_in(BUCKET_MODULES[0]):
        content = flattened(NAMED)
        bucket = FlattenedTensorBucket(content["flattened_tensor"], content["metadata"])
        same(received(forking_pickle(bucket), "flattened_bucket"), NAMED)


def test_a_flattened_bucket_without_sglang() -> None:
    content = flattened(NAMED)
    content["metadata"] = [SimpleNamespace(**vars(entry)) for entry in content["metadata"]]
    same(received(forking_pickle(content), "flattened_bucket"), NAMED)
    content["metadata"] = [vars(entry) for entry in content["metadata"]]
    same(received(forking_pickle(content), "flattened_bucket"), NAMED)


def test_an_older_flattened_bucket_counts_elements() -> None:
    named = [("a", torch.randn(2, 3)), ("b", torch.randn(5))]
    joined = torch.cat([tensor.flatten() for _, tensor in named])
    metadata = [
        {"name": "a", "shape": named[0][1].shape, "dtype": torch.float32, "start_idx": 0, "end_idx": 6, "numel": 6},
        {"name": "b", "shape": named[1][1].shape, "dtype": torch.float32, "start_idx": 6, "end_idx": 11, "numel": 5},
    ]
    payload = forking_pickle({"flattened_tensor": joined, "metadata": metadata})
    same(received(payload, "flattened_bucket"), named)


def test_an_empty_bucket_gives_no_tensors() -> None:
    assert received(forking_pickle(flattened([])), "flattened_bucket") == {}
    assert received(forking_pickle([])) == {}


@pytest.mark.parametrize("module", LOCAL_MODULES)
def test_locally_serialized_tensors_go_to_their_rank(module: str) -> None:
    with classes_in(module):
        local = [(name, LocalSerializedTensor([forking_pickle(tensor)])) for name, tensor in NAMED]
        same(received(forking_pickle(local)), NAMED)
        two = [(name, LocalSerializedTensor([b"none", forking_pickle(tensor)])) for name, tensor in NAMED]
        same(received(forking_pickle(two), rank=1, ranks=2), NAMED)
        assert "holds 2 values, but this engine has 1 ranks" in refusal(forking_pickle(two))
        nested = forking_pickle([("a", LocalSerializedTensor([forking_pickle(LocalSerializedTensor([b""]))]))])
        assert "not a tensor" in refusal(nested)


def test_an_update_through_the_updater() -> None:
    weights = FakeWeights()
    updater = WeightUpdater(weights, device="cpu", timeout_s=1.0, vote=lambda mine: mine)
    updater.begin()
    updater.receive(TensorSource(bytearray(forking_pickle(NAMED[:4])), None, updater.receiver))
    with classes_in(BUCKET_MODULES[0]):
        content = flattened(NAMED[4:])
        payload = bytearray(forking_pickle(content))
        updater.receive(TensorSource(payload, "flattened_bucket", updater.receiver), "v1")
    before = weights.snapshot()
    updater.verify()
    assert weights.snapshot() == before == FakeWeights().snapshot()
    assert updater.commit().weight_version == "v1"
    assert weights.snapshot() == FakeWeights(1).snapshot()


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["direct", "custom.loader", "", "FLATTENED_BUCKET"])
def test_other_load_formats_are_refused(load_format: str) -> None:
    message = refusal(forking_pickle(NAMED), load_format)
    assert ("checkpoint names" in message) == (load_format == "direct")


def test_descriptors_are_refused_with_what_to_do() -> None:
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    assert "set_sharing_strategy('file_system')" in refusal(forking_pickle(NAMED))


def test_cuda_handles_are_refused_without_a_device() -> None:
    """A CUDA tensor as torch pickles it, and as SGLang's clients do, with the device's UUID; no device is here."""
    arguments: list[Any] = [torch.Tensor, torch.Size([4]), (1,), 0, torch.storage.TypedStorage, torch.bfloat16, 0]
    arguments += [b"h" * 64, 512, 0, False, b"/torch_1_2_3", 7, b"e" * 64, True]

    def pickled(device: Any) -> bytes:
        buffer = io.BytesIO()

        class Pickler(ForkingPickler):
            def reducer_override(self, value: Any) -> Any:
                if isinstance(value, torch.Tensor):
                    return rebuild_cuda_tensor, (*arguments[:6], device, *arguments[7:])
                return NotImplemented

        Pickler(buffer).dump([("a", torch.zeros(4))])
        return buffer.getvalue()

    for device in (0, str(uuid.uuid4())):
        source = source_of(pickled(device))
        assert source._parse()[0].meta.shape == (4,)
        assert "CUDA" in refusal(pickled(device))
    arguments[8] = 7  # four bfloat16 need eight bytes
    assert "reaches byte 8 of a storage of 7 bytes" in refusal(pickled(0))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "a list of"),
        ({"a": 1}, "a list of"),
        ([("a", torch.ones(1), 3)], "must be a pair"),
        (["ab"], "must be a pair"),
        ([("a", 3)], "not a tensor"),
        ([(3, torch.ones(1))], "name must be"),
        ([("", torch.ones(1))], "name must be"),
        ([("a" * 513, torch.ones(1))], "name must be"),
        ([("a\nb", torch.ones(1))], "name must be"),
        ([("a", torch.ones(1, dtype=torch.complex64))], "'torch.complex64', which is not allowed"),
        ([("a", torch.ones(2).to_sparse())], "rebuild_sparse_coo_tensor', which is not allowed"),
        ([("a", torch.ones((1,) * 9))], "9 sizes"),
        ([("a", torch.empty(2, device="meta"))], "rebuild_meta_tensor', which is not allowed"),
    ],
)
def test_wrong_contents_are_refused_with_the_reason(value: Any, reason: str) -> None:
    assert reason in refusal(forking_pickle(value))


def entry(**changes: Any) -> dict[str, Any]:
    fields = {"name": "a", "shape": (4,), "dtype": torch.float32, "start_idx": 0, "end_idx": 16, "numel": 16}
    return fields | changes


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([entry(end_idx=17)], "outside"),
        ([entry(start_idx=-1)], "outside"),
        ([entry(start_idx=8, end_idx=4)], "outside"),
        ([entry(start_idx=True)], "outside"),
        ([entry(end_idx=12)], "its place in the flattened bucket has 12"),
        ([entry(numel=5)], "its place"),
        ([entry(shape=(2, -2))], "out of range"),
        ([entry(shape=(2**40, 2**40))], "out of range"),
        ([entry(shape="ab")], "no shape"),
        ([entry(dtype="float32")], "no shape or dtype"),
        ([entry(name=None)], "name must be"),
        ([entry(shape=(2,), end_idx=8, numel=8), entry(name="b", shape=(3,), start_idx=4, numel=12)], "overlap"),
        ([7], "not a FlattenedTensorMetadata"),
        (None, "metadata"),
    ],
)
def test_wrong_metadata_is_refused_with_the_reason(metadata: Any, reason: str) -> None:
    content = {"flattened_tensor": torch.zeros(16, dtype=torch.uint8), "metadata": metadata}
    assert reason in refusal(forking_pickle(content), "flattened_bucket")


def test_a_flattened_tensor_that_is_none() -> None:
    for flat in (None, torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)[::2]):
        assert "flat 'flattened_tensor'" in refusal(
            forking_pickle({"flattened_tensor": flat, "metadata": [entry()]}), "flattened_bucket"
        )


def test_more_than_the_model_has_is_refused_before_it_is_read() -> None:
    name = "/torch_1_2_3"
    huge = torch_shared_file(name, 2**40)
    assert place_tensor(InlineStorage(memoryview(b"")), torch.uint8, (0,), (1,), 0).numel == 0
    with pytest.raises(WeightRequestError, match="cannot open"):
        huge.check()
    source = source_of(forking_pickle([("a", torch.zeros(1).expand(2**20))]))
    with pytest.raises(WeightRequestError, match=r"4194304 bytes of tensors; the limit is 4194303"):
        source.announce(4194303)
    wide = source_of(forking_pickle([("a", torch.zeros(1001)[::1000])]))
    with pytest.raises(WeightRequestError, match=r"4004 bytes of tensors; the limit is 4000"):
        wide.announce(4000)


# --- shared memory ------------------------------------------------------------------------------------------------


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[TensorSender]:
    other = TensorSender(dict(NAMED), tmp_path)
    yield other
    other.close()


def files_of(sender: TensorSender) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"torch_{sender.pid}_*"))


def count(path: Path) -> int:
    return struct.unpack("<i", path.read_bytes()[:4])[0]


@pytest.mark.full(but="flattened")
@pytest.mark.parametrize("form", ["list", "flattened", "local"])
def test_memory_of_another_process(sender: TensorSender, form: str) -> None:
    names = [name for name, _ in NAMED]
    payload = base64.b64decode(sender.payload(form, names))
    assert {count(path) for path in files_of(sender)} == {2}, "the sender, and the reader to come"
    load_format = "flattened_bucket" if form == "flattened" else None
    same(received(payload, load_format), NAMED)
    assert {count(path) for path in files_of(sender)} == {1}, "the reader has counted itself out"
    sender.let_go()
    assert files_of(sender) == []


def test_memory_that_only_the_count_keeps(sender: TensorSender) -> None:
    payload = base64.b64decode(sender.payload("list", [EMBED, NORM], drop=True))
    assert [count(path) for path in files_of(sender)] == [1, 1]
    same(received(payload), [item for item in NAMED if item[0] in (EMBED, NORM)])
    assert files_of(sender) == []


def test_a_refused_payload_lets_go_of_its_memory(sender: TensorSender) -> None:
    payload = base64.b64decode(sender.payload("list", [EMBED, NORM], drop=True))
    source = source_of(payload)
    with pytest.raises(WeightRequestError, match=r"the limit is 10$"):
        source.announce(10)
    assert files_of(sender) == []
    # The bucket is announced, and then refused by the transaction: the source is dropped unread.
    source = source_of(base64.b64decode(sender.payload("list", [NORM], drop=True)))
    source.announce(MANY)
    assert len(files_of(sender)) == 1
    del source
    gc.collect()
    assert files_of(sender) == []


def test_a_sender_that_died(sender: TensorSender) -> None:
    payload = base64.b64decode(sender.payload("list", [NORM]))
    (path,) = files_of(sender)
    sender.kill()
    path.unlink(missing_ok=True)
    assert "cannot open shared memory" in refusal(payload)


def test_memory_that_shrinks_is_an_error_and_no_signal(sender: TensorSender) -> None:
    payload = base64.b64decode(sender.payload("list", [EMBED]))
    source = source_of(payload)
    source.announce(MANY)
    os.truncate(files_of(sender)[0], 70)
    with pytest.raises(ContentError, match="ends at byte 70"):
        list(source.receive())
    again = source_of(payload)
    with pytest.raises(WeightRequestError, match="has 70 bytes"):
        again.announce(MANY)


def test_only_names_that_torch_makes_are_opened() -> None:
    for name in ("/etc/passwd", "/torch_1_2_3/../x", "torch_1_2_3", "/psm_1234", "/torch_1_2_3\n", ""):
        with pytest.raises(WeightRequestError, match="not a name of torch's"):
            torch_shared_file(name, 4)
    for name in ("../etc/passwd", "a/b", "..", "", ".hidden", "x" * 201):
        with pytest.raises(WeightRequestError, match="not a name of shared memory"):
            SharedSegment(name, 4).check()


@pytest.fixture
def segment_path() -> Iterator[Path]:
    path = Path(f"/dev/shm/torch_{os.getpid()}_{uuid.uuid4().int % 10**9}_0")
    yield path
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def test_what_is_not_a_file_is_not_opened(segment_path: Path) -> None:
    segment = SharedSegment(segment_path.name, 4)
    os.mkfifo(segment_path)
    with pytest.raises(WeightRequestError, match="is not shared memory"):
        segment.check()
    segment_path.unlink()
    segment_path.symlink_to("/etc/passwd")
    with pytest.raises(WeightRequestError, match="cannot open"):
        segment.check()


@pytest.mark.parametrize("holders", [-1, 0, 1, 2])
def test_the_count_of_holders(segment_path: Path, holders: int) -> None:
    segment_path.write_bytes(struct.pack("<i", holders) + bytes(60) + b"content")
    release_torch_shared_file(torch_shared_file("/" + segment_path.name, 7))
    assert segment_path.exists() == (holders != 1)
    if holders != 1:
        assert count(segment_path) == (1 if holders == 2 else holders)


def test_the_count_of_a_file_of_another_size_is_not_touched(segment_path: Path) -> None:
    segment_path.write_bytes(struct.pack("<i", 1) + bytes(60) + b"content and more")
    release_torch_shared_file(torch_shared_file("/" + segment_path.name, 7))
    assert count(segment_path) == 1


# --- damage -------------------------------------------------------------------------------------------------------


def valid_payloads() -> list[tuple[bytes, str | None]]:
    named = [(name, tensor) for name, tensor in NAMED if name in (EMBED, NORM)]
    with classes_in(BUCKET_MODULES[0]):
        payloads: list[tuple[bytes, str | None]] = [
            (pickle.dumps(flattened(named)), "flattened_bucket"),
            (pickle.dumps(named), None),
        ]
    with classes_in(LOCAL_MODULES[0]):
        payloads.append((pickle.dumps([(n, LocalSerializedTensor([pickle.dumps(t)])) for n, t in named]), None))
    return payloads


VALID = valid_payloads()
edits = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "insert", "repeat"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def warm() -> Receiver:
    """A receiver that knows all of `VALID`."""
    receiver = new_receiver(100)
    for data, load_format in VALID:
        content_of(TensorSource(bytearray(data), load_format, receiver))
    return receiver


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(range(len(VALID))), edits)
def test_damaged_payloads_load_or_are_refused(
    warm: Receiver, which: int, changes: list[tuple[str, float, bytes]]
) -> None:
    """Every edit of a valid payload either is refused or yields the tensors that it then describes.

    So it does where payloads like it are known.
    """
    data, load_format = VALID[which]
    payload = bytearray(data)
    for kind, place, content in changes:
        at = int(place * len(payload))
        if kind == "cut":
            del payload[at : at + len(content)]
        elif kind == "insert":
            payload[at:at] = content
        elif kind == "repeat":
            payload[at:at] = payload[at : at + 40]
        else:
            payload[at : at + len(content)] = content
    try:
        tensors = received(bytes(payload), load_format)
    except WeightRequestError:
        with pytest.raises(WeightRequestError):
            content_of(TensorSource(payload, load_format, warm))
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) < 1 << 20
    same(content_of(TensorSource(payload, load_format, warm)), list(tensors.items()))


@pytest.mark.parametrize("which", range(len(VALID)))
def test_every_cut_of_a_payload_is_refused(which: int) -> None:
    data, load_format = VALID[which]
    for end in range(0, len(data), 7):
        refusal(data[:end], load_format)


def test_metadata_class_under_an_unknown_module() -> None:
    assert FlattenedTensorMetadata.__module__ == "tests.sglang_payloads"
    assert "tests.sglang_payloads" in refusal(forking_pickle(flattened(NAMED)), "flattened_bucket")

"""Calls whose tensors lie in storages: read once, then found by what describes them, and never taken for others."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import save
from torch.multiprocessing.reductions import rebuild_storage_filename, rebuild_tensor

from tests.logical_weights_fake import EMBED, NORM, FakeWeights, bits, expert_name, fused, version
from tests.loopback_updater import LoopbackSource, content_of, new_receiver, new_updater
from tests.parameter_server_stand_in import ParameterServerStandIn, Sending
from tests.sglang_payloads import (
    BUCKET_MODULES,
    LOCAL_MODULES,
    LocalSerializedTensor,
    classes_in,
    flattened,
    forking_pickle,
)
from weight_sync import plan as plan_module
from weight_sync.errors import ContentError, WeightRequestError
from weight_sync.receivers import ipc as ipc_receiver
from weight_sync.receivers import tensor as tensor_receiver
from weight_sync.receivers.ipc import IpcSource
from weight_sync.receivers.tensor import FLATTENED, SafetensorsSource, TensorSource
from weight_sync.shadow import ShadowStaging
from weight_sync.shared_segment import SharedSegment
from weight_sync.stored_tensors import InlineStorage
from weight_sync.torch_payload import TorchPayload
from weight_sync.updater import WeightUpdater

Named = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def shared_by_name() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


# --- senders: each brings tensors in one call ----------------------------------------------------------------------


def by_body(updater: WeightUpdater, tensors: Named) -> None:
    updater.receive(SafetensorsSource(bytearray(save(tensors)), updater.receiver))


def by_segment(updater: WeightUpdater, tensors: Named) -> None:
    content = save(tensors)
    memory = SharedMemory(create=True, size=len(content))
    memory.buf[: len(content)] = content
    try:
        updater.receive(SafetensorsSource(SharedSegment(memory.name, len(content)), updater.receiver))
    finally:
        memory.close()
        memory.unlink()


def by_payload(payload: bytes, load_format: str | None, updater: WeightUpdater) -> None:
    updater.receive(TensorSource(bytearray(payload), load_format, updater.receiver))


def by_flattened_bucket(updater: WeightUpdater, tensors: Named) -> None:
    content = flattened(list(tensors.items()))
    with classes_in(BUCKET_MODULES[0]):
        payload = forking_pickle(content)
    by_payload(payload, FLATTENED, updater)


def by_flattened_bytes(updater: WeightUpdater, tensors: Named) -> None:
    with classes_in(BUCKET_MODULES[2]):
        payload = pickle.dumps(flattened(list(tensors.items())))
    by_payload(payload, None, updater)


def by_shared_list(updater: WeightUpdater, tensors: Named) -> None:
    by_payload(forking_pickle(list(tensors.items())), None, updater)


def by_list(updater: WeightUpdater, tensors: Named) -> None:
    by_payload(pickle.dumps(list(tensors.items())), None, updater)


def by_local_tensors(updater: WeightUpdater, tensors: Named) -> None:
    with classes_in(LOCAL_MODULES[0]):
        local = [(name, LocalSerializedTensor([forking_pickle(each)])) for name, each in tensors.items()]
        payload = forking_pickle(local)
    by_payload(payload, None, updater)


def by_transposed_views(updater: WeightUpdater, tensors: Named) -> None:
    views = {name: each.mT.contiguous().mT if each.dim() > 1 else each for name, each in tensors.items()}
    assert any(not view.is_contiguous() for view in views.values())
    by_list(updater, views)


def by_conversation(updater: WeightUpdater, tensors: Named, form: Any = "json") -> None:
    with ParameterServerStandIn(512, form) as server, Sending(lambda: server.update(list(tensors.items()))) as sending:
        updater.receive(IpcSource(server.handles, updater.receiver))
    assert sending.error is None


def by_pickled_conversation(updater: WeightUpdater, tensors: Named) -> None:
    by_conversation(updater, tensors, "pickle")


Sender = Callable[[WeightUpdater, Named], None]
DESCRIBED = (by_body, by_segment, by_flattened_bucket, by_flattened_bytes, by_conversation, by_pickled_conversation)
"""Found by bytes of the call: what follows costs nothing for each tensor."""
LISTED = (by_shared_list, by_list, by_local_tensors, by_transposed_views)
"""Each tensor has a storage of its own, which must be read about."""
READERS = (
    (tensor_receiver, "parse_text"),
    (tensor_receiver, "split_flattened"),
    (ipc_receiver, "read_bucket"),
    (plan_module, "plan_bucket"),
)


def refresh(updater: WeightUpdater, *calls: Callable[[], None]) -> None:
    updater.begin()
    for call in calls:
        call()
    updater.verify()
    updater.commit()


def one_by_one(weights: FakeWeights, tensors: Named) -> None:
    updater = new_updater(weights)
    refresh(updater, lambda: updater.receive(LoopbackSource(list(tensors.items()), packed=False)))


# --- replays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [dict, fused])
@pytest.mark.parametrize("send", [*DESCRIBED, *LISTED])
def test_every_refresh_leaves_what_single_tensors_leave(send: Sender, form: type) -> None:
    planned, single = FakeWeights(), FakeWeights()
    updater = new_updater(planned)
    for seed in (1, 2, 3):
        sent = form(version(seed))
        refresh(updater, lambda: send(updater, sent))  # noqa: B023
        one_by_one(single, sent)
        assert planned.snapshot() == single.snapshot()


@pytest.mark.parametrize("send", DESCRIBED)
def test_the_second_refresh_reads_no_tensor(send: Sender) -> None:
    updater = new_updater(FakeWeights())
    refresh(updater, lambda: send(updater, version(1)))
    with ExitStack() as stack:
        for module, name in READERS:
            wrong = mock.patch.object(module, name, side_effect=AssertionError(f"{name} was called"))
            if name != "read_bucket":  # it reads the ends, too
                stack.enter_context(wrong)
        stack.enter_context(mock.patch.object(ShadowStaging, "write", side_effect=AssertionError("by itself")))
        refresh(updater, lambda: send(updater, version(2)))


@pytest.mark.parametrize("send", LISTED)
def test_the_second_refresh_makes_no_plan(send: Sender) -> None:
    updater = new_updater(FakeWeights())
    refresh(updater, lambda: send(updater, version(1)))
    with mock.patch.object(plan_module, "plan_bucket", side_effect=AssertionError("another plan")):
        refresh(updater, lambda: send(updater, version(2)))


@pytest.mark.parametrize("send", DESCRIBED)
def test_metadata_that_changes_half_way_is_read_anew(send: Sender) -> None:
    weights = FakeWeights()
    updater = new_updater(weights)
    refresh(updater, lambda: send(updater, version(1)))
    sent = version(2)
    names = sorted(sent)
    parts = [{name: sent[name] for name in some} for some in (names[:3], names[3:])]
    refresh(updater, *(lambda part=part: send(updater, part) for part in parts))  # type: ignore[misc]
    other = FakeWeights()
    one_by_one(other, sent)
    assert weights.snapshot() == other.snapshot()


@pytest.mark.parametrize("send", [*DESCRIBED, *LISTED])
def test_a_value_that_is_not_finite_is_found_in_a_replay(send: Sender) -> None:
    weights = FakeWeights()
    updater = new_updater(weights)
    refresh(updater, lambda: send(updater, version(1)))
    before, sent = weights.snapshot(), version(2)
    sent[EMBED][0, 0] = torch.inf
    updater.begin()
    with pytest.raises(ContentError, match="not finite"):
        if send in (by_conversation, by_pickled_conversation):
            with ParameterServerStandIn(512) as server, Sending(lambda: server.update(list(sent.items()))):
                updater.receive(IpcSource(server.handles, updater.receiver))
        else:
            send(updater, sent)
    updater.abort()
    assert weights.snapshot() == before


# --- what a flattened bucket is found by ------------------------------------------------------------------------------


def many(count: int) -> Named:
    return {f"model.layers.{number}.weight": torch.full((2,), float(number)) for number in range(count)}


def pickled(tensors: Named, **more: Any) -> bytes:
    content = flattened(list(tensors.items())) | more
    with classes_in(BUCKET_MODULES[0]):
        return pickle.dumps(content)


class _Reduced:
    """Something that is pickled as a call of a function."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def in_segment(handle: str, content: bytes) -> _Reduced:
    """Return a uint8 tensor in a segment of a chosen name, to be pickled as torch's reductions do."""
    Path("/dev/shm", handle).write_bytes(bytes(64) + content)
    place = (b"", f"/{handle}".encode(), len(content), torch.uint8)
    storage = _Reduced(rebuild_storage_filename, (torch.UntypedStorage, *place))
    return _Reduced(rebuild_tensor, (torch.Tensor, storage, (0, torch.Size([len(content)]), (1,), False)))


def test_frames_that_are_cut_elsewhere_make_no_other_call() -> None:
    """A front is of another length where its name is, and then frames of the pickle end elsewhere."""
    tensors, receiver = many(3000), new_receiver(100_000)
    content = flattened(list(tensors.items()))
    joined = content["flattened_tensor"].numpy().tobytes()
    with mock.patch.object(tensor_receiver, "split_flattened", wraps=tensor_receiver.split_flattened) as read:
        for number in (1, 22, 333):
            handle = f"torch_{os.getpid()}_{number}_0"
            try:
                content["flattened_tensor"] = in_segment(handle, joined)
                with classes_in(BUCKET_MODULES[0]):
                    payload = pickle.dumps(content, 4)
                found = content_of(TensorSource(bytearray(payload), FLATTENED, receiver))
            finally:
                Path("/dev/shm", handle).unlink()
            assert {name: bits(each) for name, each in found.items()} == {n: bits(t) for n, t in tensors.items()}
    assert payload.count(b"\x95") > 3
    assert read.call_count == 1


def opcodes(module: str) -> bytes:
    """Return a flattened bucket without bytes, whose only tensor is called what `module` is, fetched from the memo."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    name = b"\x93"
    kinds = [("torch", "Tensor"), ("torch.storage", "UntypedStorage"), ("torch", "uint8")]
    tensor, storage, dtype = (text(home) + text(kind) + name for home, kind in kinds)
    build = text(module) + b"\x94" + text("_rebuild_cuda_tensor_modified") + name
    shape = text("torch") + text("Size") + name + b"K\x00\x85\x85R"
    arguments = b"(" + tensor + shape + b"K\x01\x85K\x00" + storage + dtype + b"K\x00NK\x00K\x00\x89NK\x00N\x89t"
    entry = b"}(" + text("name") + b"h\x00" + text("shape") + b"K\x00\x85" + text("dtype") + dtype
    entry += text("start_idx") + b"K\x00" + text("end_idx") + b"K\x00" + text("numel") + b"K\x00u"
    front = b"\x80\x04}(" + text("flattened_tensor") + build + arguments + b"R" + text("metadata")
    return front + b"](" + entry + b"eu."


def test_equal_rests_after_other_fronts_are_other_calls() -> None:
    receiver = new_receiver()
    modules = ("sglang.srt.utils.patch_torch", "sglang.srt.patch_torch")
    for module in modules * 2:
        assert list(content_of(TensorSource(bytearray(opcodes(module)), FLATTENED, receiver))) == [module]


@pytest.mark.mutant
@pytest.mark.parametrize("left_out", ["memo", "rest"])
def test_a_key_that_leaves_out_a_field_is_noticed(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tensor_receiver._key_of
    monkeypatch.setattr(
        tensor_receiver, "_key_of", lambda front: whole(front._replace(**{left_out: type(getattr(front, left_out))()}))
    )
    first, second = (opcodes(module) for module in ("sglang.srt.utils.patch_torch", "sglang.srt.patch_torch"))
    if left_out == "rest":
        first, second = (pickled({name: torch.zeros(2)}) for name in "ab")
    receiver = new_receiver()
    names = [list(content_of(TensorSource(bytearray(data), FLATTENED, receiver))) for data in (first, second)]
    assert names[0] == names[1]


NARROWED = (tensor_receiver, ipc_receiver)


def swapped(tensors: Named) -> Named:
    """Return the same content, in which two tensors of one shape have each other's name."""
    one, other = UP_PROJ
    names = {one: other, other: one}
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


UP_PROJ = [expert_name(expert, "up_proj") for expert in (0, 1)]


@pytest.mark.mutant
@pytest.mark.parametrize("send", DESCRIBED)
def test_a_digest_of_other_bytes_is_noticed(send: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: calls of the same length have the same digest."""
    sha256 = hashlib.sha256
    short = SimpleNamespace(sha256=lambda data: sha256(bytes([len(data) % 256])))
    for module in NARROWED:
        monkeypatch.setattr(module, "hashlib", short)
    weights, other, sent = FakeWeights(), FakeWeights(), version(1)
    updater = new_updater(weights)
    for name in UP_PROJ:
        updater.begin(coverage="partial")
        send(updater, {name: sent[name]})
        updater.verify()
        updater.commit()
        other.write(name, sent[name])
    assert weights.snapshot() != other.snapshot()


def test_swapped_names_are_another_call() -> None:
    weights, other = FakeWeights(), FakeWeights()
    updater = new_updater(weights)
    for send in DESCRIBED:
        refresh(updater, lambda: send(updater, version(1)))  # noqa: B023
        refresh(updater, lambda: send(updater, swapped(version(1))))  # noqa: B023
        one_by_one(other, swapped(version(1)))
        assert weights.snapshot() == other.snapshot()


# --- what is checked each time ----------------------------------------------------------------------------------------


def flat(num_bytes: int, *entries: dict[str, Any]) -> bytes:
    return pickle.dumps({"flattened_tensor": torch.zeros(num_bytes, dtype=torch.uint8), "metadata": list(entries)})


def entry(name: str, start: int, stop: int) -> dict[str, Any]:
    shape = (stop - start,)
    return {"name": name, "shape": shape, "dtype": torch.uint8, "start_idx": start, "end_idx": stop, "numel": None}


def test_a_flattened_tensor_that_is_shorter_than_the_first_time() -> None:
    receiver = new_receiver()
    for _ in range(2):
        content_of(TensorSource(bytearray(flat(32, entry("a", 0, 16), entry("b", 16, 32))), FLATTENED, receiver))
    short = TensorSource(bytearray(flat(31, entry("a", 0, 16), entry("b", 16, 32))), FLATTENED, receiver)
    with pytest.raises(WeightRequestError, match="outside of a flattened bucket of 31 elements"):
        short.announce(1 << 20)
    overlapping = TensorSource(bytearray(flat(32, entry("a", 0, 17), entry("b", 16, 32))), FLATTENED, receiver)
    with pytest.raises(WeightRequestError, match="a and b overlap"):
        overlapping.announce(1 << 20)


def test_a_segment_that_is_shorter_than_the_first_time() -> None:
    receiver, content = new_receiver(), save(version(1))
    memory = SharedMemory(create=True, size=len(content))
    try:
        memory.buf[: len(content)] = content
        for _ in range(2):
            content_of(SafetensorsSource(SharedSegment(memory.name, len(content)), receiver))
        os.truncate(Path("/dev/shm", memory.name), len(content) - 1)
        for nbytes, reason in ((len(content), "has [0-9]+ bytes, but the call needs"), (len(content) - 1, "describes")):
            with pytest.raises(WeightRequestError, match=reason):
                SafetensorsSource(SharedSegment(memory.name, nbytes), receiver).announce(1 << 20)
    finally:
        memory.close()
        memory.unlink()


def test_a_buffer_that_is_shorter_than_the_first_time() -> None:
    updater = new_updater(FakeWeights())
    message = b'[{"name": "%s", "dtype": "float32", "shape": [4], "offset": 496}]' % NORM.encode()
    for num_bytes, reason in ((512, None), (512, None), (511, "reaches byte 512 of a storage of 511")):
        updater.begin(coverage="partial")
        with ParameterServerStandIn(256, "json") as server:
            handle = json.dumps(json.loads(server.handle()) | {"nbytes": num_bytes}).encode()
            server.handle = lambda: handle  # type: ignore[method-assign]  # noqa: B023
            server.rewrite = lambda index, _: message
            with Sending(lambda: server.update([("x", torch.zeros(4))])):
                if reason is None:
                    updater.receive(IpcSource(server.handles, updater.receiver))
                else:
                    with pytest.raises(WeightRequestError, match=reason):
                        updater.receive(IpcSource(server.handles, updater.receiver))
        updater.abort()


@pytest.mark.parametrize("max_bytes", [31, 32])
def test_a_known_call_may_have_no_more_than_any_other(max_bytes: int) -> None:
    receiver, payload = new_receiver(), flat(32, entry("a", 0, 32))
    content_of(TensorSource(bytearray(payload), FLATTENED, receiver))
    source = TensorSource(bytearray(payload), FLATTENED, receiver)
    if max_bytes == 32:
        source.announce(max_bytes)
    else:
        with pytest.raises(WeightRequestError, match="has 32 bytes of tensors; the limit is 31"):
            source.announce(max_bytes)


def test_a_bucket_that_is_shorter_than_its_layout_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that gives less than it has: the tables point outside of the bucket, and the operator refuses them."""
    weights = FakeWeights()
    updater = new_updater(weights)
    refresh(updater, lambda: by_body(updater, version(1)))
    before = weights.snapshot()
    read = InlineStorage.read
    monkeypatch.setattr(InlineStorage, "read", lambda self, start, stop, room=None: read(self, start, stop)[:-1])
    updater.begin()
    monkeypatch.setattr(tensor_receiver, "header_text", lambda *_: HEADER)
    with pytest.raises(RuntimeError, match="outside of the source"):
        updater.receive(SafetensorsSource(bytearray(save(version(2))), updater.receiver))
    updater.abort()
    assert weights.snapshot() == before


HEADER = save(version(1))[8 : 8 + int.from_bytes(save(version(1))[:8], "little")]


# --- how a pickle is read in two halves -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {"metadata": [], "flattened_tensor": torch.zeros(4)},
        {"flattened_tensor": [1], "metadata": []},
        {"flattened_tensor": torch.zeros(4), "other": 1},
        {"flattened_tensor": torch.zeros(4)},
        [("a", torch.zeros(4))],
        5,
    ],
)
def test_other_pickles_have_no_front(value: Any) -> None:
    """Nothing of them is noted either, as they are read again: a segment would be counted down twice."""
    reader = TorchPayload()
    assert reader.read_front(memoryview(forking_pickle(value)), "flattened_tensor", "metadata") is None
    assert reader.segments == [] and reader.cuda_storages == []


def test_a_second_tensor_behind_the_front_is_refused() -> None:
    source = TensorSource(bytearray(pickled(many(1), more=torch.zeros(1))), FLATTENED, new_receiver())
    with pytest.raises(WeightRequestError, match="not an allowed function"):
        source.announce(1 << 20)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_front_and_its_rest_are_the_pickle(protocol: int) -> None:
    content = flattened(list(many(2000).items()))
    content["metadata"] = [vars(each) for each in content["metadata"]]
    data = pickle.dumps(content, protocol)
    reader = TorchPayload()
    front = reader.read_front(memoryview(data), "flattened_tensor", "metadata")
    assert front is not None
    value = reader.read_rest("flattened_tensor", "metadata", front)
    assert value == reader.read(memoryview(data)) | {"flattened_tensor": front.value}

"""A member that joins by vLLM's rendezvous: the id, what follows it, and what a sender may do wrong."""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pynccl_stand_in import ID_BYTES, NcclStandIn, SenderStandIn, pickled
from weight_sync import vllm_rendezvous
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port
from weight_sync.receivers.distributed import announced, layouts_of, receive_distributed
from weight_sync.tensor_meta import TensorMeta
from weight_sync.update_groups import WeightUpdateGroups
from weight_sync.vllm_rendezvous import unique_id_of
from weight_sync.waiting import Patience, in_thread

METAS = [TensorMeta("a", torch.float32, (3,)), TensorMeta("b", torch.bfloat16, (2, 2))]


class Boom:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._folder),)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightUpdateGroups]:
    """Groups of an engine on a CPU whose NCCL is the stand-in."""
    monkeypatch.setattr("weight_sync.update_groups.resolve_backend", lambda backend, device: backend)
    monkeypatch.setattr(vllm_rendezvous, "nccl_backend", NcclStandIn)
    groups = WeightUpdateGroups(torch.device("cpu"), 10.0, Patience())
    yield groups
    groups.close()


def test_members_join_with_the_sender_s_id_and_receive_its_broadcasts(groups: WeightUpdateGroups) -> None:
    port, values = free_port(), [torch.randn(3), torch.randn(2, 2).bfloat16()]

    def send() -> None:
        sender = SenderStandIn(port, 2, free_port())
        sender.connect()
        for tensor in values:
            sender.broadcast(tensor)

    sent = in_thread(send)
    groups.init("127.0.0.1", port, 1, 2, "from vllm", "pynccl")
    group = groups.get("from vllm")
    assert group.backend == "nccl" and group.is_connected
    messages = announced(METAS, None)
    (bucket,) = receive_distributed(group, messages, layouts_of(messages, in_turns=False), "cpu", 10.0)
    for (name, got), meta, value in zip(bucket.named(), METAS, values, strict=True):
        assert name == meta.name and torch.equal(got, value)
    sent.result(10)
    backend = group.process_group
    groups.destroy("from vllm")
    assert backend.has_ended  # type: ignore[union-attr]


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_an_id_is_read_as_it_was_pickled(protocol: int) -> None:
    unique_id = os.urandom(ID_BYTES)
    assert unique_id_of(pickled(unique_id, protocol)) == unique_id


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"no pickle",
        pickle.dumps(b"x" * 127),
        pickle.dumps(b"x" * 129),
        pickle.dumps([b"x" * 128, b"y" * 128]),
        pickle.dumps("x" * 128),
        pickled(bytes(ID_BYTES))[:-80],
        pickle.dumps(b"x" * 5000),
    ],
)
def test_what_has_no_id_is_refused(value: bytes) -> None:
    with pytest.raises(TransportError, match="no NCCL id of 128 bytes"):
        unique_id_of(value)


def test_nothing_in_a_pickle_is_executed(tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    value = pickle.dumps([Boom(harm), b"x" * ID_BYTES])
    assert unique_id_of(value) == b"x" * ID_BYTES and not harm.exists()
    pickle.loads(value)  # noqa: S301 the payload does harm where it is unpickled
    assert harm.exists()


def test_damaged_pickles_are_refused_or_give_an_id() -> None:
    rng, whole = random.Random(0), pickled(bytes(range(ID_BYTES)))
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert len(unique_id_of(bytes(damaged[: rng.randint(1, len(damaged))]))) == ID_BYTES
        except TransportError:
            continue


def test_a_sender_that_never_states_its_id_is_given_up(groups: WeightUpdateGroups) -> None:
    groups._timeout_s = 1.0
    start = time.monotonic()
    with pytest.raises(TransportError, match="cannot join group 'silent'"):
        groups.init("127.0.0.1", free_port(), 1, 2, "silent", "pynccl")
    assert time.monotonic() - start < 8
    port = free_port()
    sender = in_thread(SenderStandIn, port, 2, free_port(), pickle.dumps("nothing"))
    with pytest.raises(TransportError, match="no NCCL id"):
        groups.init("127.0.0.1", port, 1, 2, "wrong", "pynccl")
    sender.result(10)


def test_a_sender_that_stops_after_its_id_is_given_up(groups: WeightUpdateGroups) -> None:
    groups._timeout_s = 2.0
    port = free_port()
    sender = in_thread(SenderStandIn, port, 2, free_port())
    start, before = time.monotonic(), threading.active_count()
    with pytest.raises(TransportError, match="cannot join group 'half'"):
        groups.init("127.0.0.1", port, 1, 2, "half", "pynccl")
    assert time.monotonic() - start < 10 and threading.active_count() <= before + 2
    sender.result(10)


@pytest.mark.mutant
def test_a_member_that_skips_the_all_reduce_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(NcclStandIn):
        def __init__(self, *_: object) -> None:
            self.allreduces = 0

        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)

    monkeypatch.setattr(vllm_rendezvous, "nccl_backend", Hasty)
    store = dist.HashStore()
    store.set(vllm_rendezvous.ID_KEY, pickled(bytes(ID_BYTES)))  # type: ignore[arg-type]
    handle = GroupHandle("hasty", 1, 2, "nccl", 1.0, None)
    handle.process_group = vllm_rendezvous.connect_on(torch.device("cpu"))(handle, store, time.monotonic() + 1)
    with pytest.raises(AssertionError, match="reduce one number"):
        handle.start_broadcast(torch.zeros(3))


def test_the_stand_in_pickles_as_vllm_does() -> None:
    names = [given for _, given, _ in pickletools.genops(pickled(bytes(ID_BYTES))) if isinstance(given, str)]
    assert "vllm.distributed.device_communicators.pynccl_wrapper" in names and "ncclUniqueId" in names

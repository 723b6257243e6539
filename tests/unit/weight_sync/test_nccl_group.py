"""A weight update group over NCCL: every wait ends at our deadline, and the process lives on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.nccl_weight_group_stand_in import NcclGroupStandIn
from weight_sync import nccl_group, process_group
from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.process_group import GroupHandle, free_port, resolve_backend
from weight_sync.receivers import distributed
from weight_sync.receivers.distributed import announced, layouts_of, receive_distributed
from weight_sync.tensor_meta import TensorMeta
from weight_sync.update_groups import WeightUpdateGroups
from weight_sync.waiting import Patience, in_thread

DEADLINE_S = 0.3
METAS = [TensorMeta("a", torch.float32, (3,)), TensorMeta("b", torch.bfloat16, (2, 2))]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GroupHandle, NcclGroupStandIn]]:
    stand_in = NcclGroupStandIn()
    destroyed: list[object] = []
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    monkeypatch.setattr(process_group, "_CLOSE_S", 0.2)
    handle = GroupHandle("g", 1, 2, "nccl", DEADLINE_S, stand_in)  # type: ignore[arg-type]
    yield handle, stand_in
    handle.destroy()
    stand_in.others_come.set()


def took(call, error: type[Exception] = TransportError) -> float:  # type: ignore[no-untyped-def]
    start = time.monotonic()
    with pytest.raises(error):
        call()
    return time.monotonic() - start


def test_a_sender_that_never_comes_is_given_up(joined: tuple[GroupHandle, NcclGroupStandIn]) -> None:
    """The call that connects the members never returns, and an abort would not return either."""
    handle, _ = joined
    assert took(lambda: handle.start_broadcast(torch.zeros(3))) >= DEADLINE_S
    assert handle.broken
    handle.destroy()
    with pytest.raises(TransportError, match="join it again"):
        handle.start_broadcast(torch.zeros(3))


def test_a_broadcast_that_never_ends_is_given_up_before_torch_ends_the_process(
    joined: tuple[GroupHandle, NcclGroupStandIn],
) -> None:
    handle, stand_in = joined
    stand_in.others_come.set()
    work = handle.start_broadcast(torch.zeros(3))
    took(lambda: handle.finish(work, time.monotonic() + DEADLINE_S))
    assert not stand_in.ended_process
    handle.destroy()
    assert stand_in.was_aborted


@pytest.mark.mutant
def test_a_deadline_that_is_the_watchdogs_as_well_is_noticed(
    joined: tuple[GroupHandle, NcclGroupStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, stand_in = joined
    monkeypatch.setattr(nccl_group, "WATCHDOG_GRACE_S", 0.0)
    stand_in.others_come.set()
    work = handle.start_broadcast(torch.zeros(3))
    took(lambda: handle.finish(work, time.monotonic() + DEADLINE_S))
    assert stand_in.ended_process


def test_an_abort_ends_the_wait_for_a_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_CLOSE_S", 0.2)
    stand_in, patience = NcclGroupStandIn(), Patience()
    handle = GroupHandle("g", 1, 2, "nccl", 60.0, stand_in, patience=patience)  # type: ignore[arg-type]
    threading.Timer(0.1, patience.give_up, ("an abort came",)).start()
    with pytest.raises(TransportError, match="an abort came"):
        handle.start_broadcast(torch.zeros(3))
    stand_in.others_come.set()


def test_a_refusal_ends_the_wait_for_a_member_that_will_not_come(joined: tuple[GroupHandle, NcclGroupStandIn]) -> None:
    """Only that wait: a member that refuses a later message is in the group."""
    handle, stand_in = joined
    handle.timeout_s = 60.0
    threading.Timer(0.1, handle.end_connecting, ("it refused",)).start()
    assert took(lambda: handle.start_broadcast(torch.zeros(3))) < 10
    other = GroupHandle("h", 1, 2, "nccl", DEADLINE_S, stand_in)  # type: ignore[arg-type]
    stand_in.others_come.set()
    other.start_broadcast(torch.zeros(3))
    other.end_connecting("it refused")
    other.start_broadcast(torch.zeros(3))
    assert not other.broken


def test_a_bucket_arrives_and_is_read_after_it_is_complete(joined: tuple[GroupHandle, NcclGroupStandIn]) -> None:
    handle, stand_in = joined
    stand_in.others_come.set()
    sent = torch.arange(20, dtype=torch.uint8)

    def send() -> None:
        while not stand_in.works:
            time.sleep(0.001)
        time.sleep(0.05)
        stand_in.works[0].deliver(sent)

    threading.Thread(target=send, daemon=True).start()
    messages = announced(METAS, "flattened_bucket")
    (bucket,) = receive_distributed(handle, messages, layouts_of(messages, in_turns=False), "cpu", 5.0)
    content = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket.named()])
    assert torch.equal(content, sent)
    assert stand_in.works[0].waits == 1, "the thread's stream comes after NCCL's"


# --- a broadcast for each tensor --------------------------------------------------------------------------------------


def receive_each(
    handle: GroupHandle, stand_in: NcclGroupStandIn, sizes: list[int], num_sent: int | None = None
) -> dict[str, torch.Tensor]:
    """Receive one tensor a message; rank 0 sends the first `num_sent`, each once the receiver waits."""
    stand_in.others_come.set()
    metas = [TensorMeta(f"t{number}", torch.uint8, (size,)) for number, size in enumerate(sizes)]

    def send() -> None:
        for number, size in enumerate(sizes[:num_sent]):
            stand_in.send(torch.full((size,), number % 251, dtype=torch.uint8))

    threading.Thread(target=send, daemon=True).start()
    messages = announced(metas, None)
    layouts = layouts_of(messages, in_turns=False)
    (bucket,) = receive_distributed(handle, messages, layouts, "cpu", DEADLINE_S if num_sent else 10.0)
    return dict(bucket.named())


@pytest.mark.parametrize(
    ("sizes", "num_messages", "num_bytes", "waits"),
    [
        ([10] * 20, 20, 200, 2),
        ([100] * 30, 10, 1000, 6),
        ([10, 5000, 10, 10, 5000, 600, 600], 3, 5600, 6),
        ([1] * 70, 32, 32, 5),
    ],
    ids=["few", "many bytes", "larger than the window", "many messages"],
)
def test_messages_of_a_call_are_on_their_way_together(
    joined: tuple[GroupHandle, NcclGroupStandIn],
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    num_messages: int,
    num_bytes: int,
    waits: int,
) -> None:
    monkeypatch.setattr(distributed, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(distributed, "WINDOW_MESSAGES", 32)
    handle, stand_in = joined
    got = receive_each(handle, stand_in, sizes)
    assert [(int(tensor[0]), tensor.unique().numel()) for tensor in got.values()] == [
        (number % 251, 1) for number in range(len(sizes))
    ]
    assert stand_in.largest_window == (num_messages, num_bytes)
    assert sum(work.was_asked for work in stand_in.works) == waits, "the host waits once for each batch"
    assert {work.waits for work in stand_in.works} == {1}, "torch lets go of every tensor"
    assert handle._works == []


def test_only_the_first_collective_has_a_thread_of_its_own(joined: tuple[GroupHandle, NcclGroupStandIn]) -> None:
    handle, stand_in = joined
    receive_each(handle, stand_in, [8] * 5)
    first, *others = stand_in.threads
    assert first != threading.get_ident()
    assert others == [threading.get_ident()] * 4


def test_a_sender_that_stops_amid_a_window_is_given_up(joined: tuple[GroupHandle, NcclGroupStandIn]) -> None:
    handle, stand_in = joined
    assert took(lambda: receive_each(handle, stand_in, [8] * 5000, num_sent=300)) >= DEADLINE_S * 0.9
    assert handle.broken
    assert not stand_in.ended_process


@pytest.mark.mutant
def test_a_window_longer_than_the_queue_is_noticed(
    joined: tuple[GroupHandle, NcclGroupStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call would wait in CUDA, where no deadline ends it."""
    monkeypatch.setattr(distributed, "WINDOW_MESSAGES", 1 << 20)
    handle, stand_in = joined
    ended = in_thread(receive_each, handle, stand_in, [8] * 5000, 300)
    with pytest.raises(TimeoutError):
        ended.exception(3 * DEADLINE_S)
    for _ in range(5000 - 300):
        stand_in.send(torch.zeros(8, dtype=torch.uint8))


# --- which backend ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "device", "resolved"),
    [
        (None, "cpu", "gloo"),
        ("nccl", "cpu", "gloo"),
        ("gloo", "cpu", "gloo"),
        (None, "cuda", "nccl"),
        ("nccl", "cuda:1", "nccl"),
        ("gloo", "cuda", "gloo"),
        ("pynccl", "cuda", "pynccl"),
        ("pynccl", "cpu", "gloo"),
    ],
)
def test_the_backend_follows_the_device(backend: str | None, device: str, resolved: str) -> None:
    assert resolve_backend(backend, device) == resolved


def test_other_backends_are_refused() -> None:
    for device in ("cpu", "cuda"):
        with pytest.raises(WeightRequestError, match="unknown backend 'hccl'; known: gloo, nccl, pynccl"):
            resolve_backend("hccl", device)


def test_a_cpu_engine_says_that_it_did_not_join_over_nccl() -> None:
    groups = WeightUpdateGroups(torch.device("cpu"), 0.3, Patience())
    for backend, told in (("nccl", True), ("gloo", False)):
        with pytest.raises(TransportError) as refused:
            groups.init("127.0.0.1", free_port(), 1, 2, f"group-{backend}", backend)
        assert ("joined over gloo, not nccl" in str(refused.value)) is told

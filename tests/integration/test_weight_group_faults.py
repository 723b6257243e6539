"""The effect of a trainer's mistakes on receivers: every wait ends, and no mistake ends a process."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time

import pytest
import torch

from tests import weight_receivers
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port, init_process_group

ELEMENTS = 100_000  # of bfloat16, so that twice the bytes are far beyond any small slack
MUCH = 256 << 20  # bytes: on their way for long enough
FORMS = (None, "flattened_bucket", "pieces")


@pytest.mark.full(but="1")
@pytest.mark.parametrize("receivers", [1, 2, 3, 4])
def test_w09_float32_where_bfloat16_was_announced(receivers: int) -> None:
    """Every receiver reports the fault and lives.  Up to two receivers keep the group; more than two all leave it."""
    groups = [(free_port(), load_format) for load_format in FORMS]
    processes = weight_receivers.start(receivers, ELEMENTS, groups)
    for port, load_format in groups:
        name = weight_receivers.group_name(port)
        trainer = init_process_group("127.0.0.1", port, 0, 1 + receivers, name, "gloo", weight_receivers.TIMEOUT_S)
        assert _bucket(trainer, load_format, 1.0, torch.bfloat16)
        _bucket(trainer, load_format, 2.0, torch.float32)
        assert _bucket(trainer, load_format, 3.0, torch.bfloat16) == (receivers <= 2)
        trainer.destroy()
    for told in weight_receivers.answers(processes):
        for first, second, third in zip(*[iter(told)] * weight_receivers.BUCKETS, strict=True):
            assert first == dict.fromkeys(weight_receivers.TENSORS, 1.0)
            assert second["error"] == "ContentError"
            assert "longer than" in second["message"]
            assert second["broken"] == (receivers > 2)
            assert third.get("a") == (3.0 if receivers <= 2 else None)


@pytest.mark.full
def test_w05_a_listener_that_accepts_and_says_nothing() -> None:
    """The rendezvous ends at its deadline, and what it leaves behind ends with the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        before = threading.active_count()
        start = time.monotonic()
        with pytest.raises(TransportError, match="did not answer within 1 s"):
            init_process_group("127.0.0.1", port, 1, 2, "silent", "gloo", 1.0)
        assert time.monotonic() - start < 5.0
        assert threading.active_count() > before  # it still hangs in there
    deadline = time.monotonic() + 10.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before


@pytest.mark.full
@pytest.mark.parametrize("members", [1, 4])
def test_w24_a_trainer_killed_amid_a_message_is_noticed(members: int) -> None:
    """Every member notices, also one that gets the message from other members; and leaving the group takes no time."""
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    trainer = spawn.Process(target=_broadcast_much, args=(port, 1 + members), daemon=True)
    trainer.start()
    others = [spawn.Process(target=_leave_when_lost, args=(port, rank, 1 + members)) for rank in range(1, members)]
    for other in others:
        other.start()
    group = init_process_group("127.0.0.1", port, members, 1 + members, f"much{port}", "gloo", 60.0)
    start = time.monotonic()
    message = torch.zeros(MUCH, dtype=torch.uint8)
    work = group.start_broadcast(message)
    while not message[0]:
        assert time.monotonic() < start + 30
    trainer.kill()
    start = time.monotonic()
    with pytest.raises(TransportError, match="rank 0 has disconnected"):
        group.finish(work, start + 30)
    group.destroy()
    for other in others:
        other.join(30)
        assert other.exitcode == 0
    assert time.monotonic() - start < 15


def _broadcast_much(port: int, members: int) -> None:
    group = init_process_group("127.0.0.1", port, 0, members, f"much{port}", "gloo", 60.0)
    group.start_broadcast(torch.ones(MUCH, dtype=torch.uint8))
    time.sleep(60)


def _leave_when_lost(port: int, rank: int, members: int) -> None:
    group = init_process_group("127.0.0.1", port, rank, members, f"much{port}", "gloo", 60.0)
    message = torch.zeros(MUCH, dtype=torch.uint8)
    try:
        group.finish(group.start_broadcast(message), time.monotonic() + 30)
    except TransportError:
        group.destroy()
    else:
        assert message.all()  # it was faster
    os._exit(0)


def _bucket(trainer: GroupHandle, load_format: str | None, value: float, dtype: torch.dtype) -> bool:
    """Broadcast as a trainer would; whether it went through."""
    tensors = [torch.full((ELEMENTS,), value, dtype=dtype) for _ in weight_receivers.TENSORS]
    for message in tensors if load_format is None else [torch.cat(tensors).view(torch.uint8)]:
        try:
            trainer.finish(trainer.start_broadcast(message), time.monotonic() + weight_receivers.TIMEOUT_S)
        except TransportError:
            return False
    return True

"""The scheduler's end of the sockets: order, bursts, waking, and a main process that does not read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rollout.core.io_struct import AbortReqInput, ControlReqOutput, decode_output, encode
from rollout.scheduler.channel import ZmqChannel

DEADLINE_S = 10.0


class Main:
    """The main process's two sockets."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.push, self.pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        for socket, name in ((self.push, "input"), (self.pull, "output")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{folder}/{name}")

    def send(self, rid: str) -> None:
        self.push.send(encode(AbortReqInput(rids=[rid])))


@pytest.fixture
def main(tmp_path: Path) -> Iterator[Main]:
    main = Main(tmp_path)
    yield main
    main.context.destroy(linger=0)


@pytest.fixture
def channel(main: Main, tmp_path: Path) -> Iterator[ZmqChannel]:
    channel = ZmqChannel(f"ipc://{tmp_path}/input", f"ipc://{tmp_path}/output")
    yield channel
    channel.close()


def test_a_burst_comes_in_order_and_in_parts(main: Main, channel: ZmqChannel) -> None:
    count = 1000
    for i in range(count):
        main.send(str(i))
    received, parts, deadline = [], [], time.monotonic() + DEADLINE_S
    while len(received) < count and time.monotonic() < deadline:
        messages = channel.receive(50)
        parts.append(len(messages))
        received += [message.rids[0] for message in messages]
    assert received == [str(i) for i in range(count)]
    assert max(parts) < count / 10, "one turn of the loop takes a bounded number of messages"


def test_nothing_there_is_no_wait(channel: ZmqChannel) -> None:
    start = time.monotonic()
    for _ in range(100):
        assert channel.receive(0) == []
    assert time.monotonic() - start < 1.0


def test_waking_ends_a_wait_and_never_fails(channel: ZmqChannel) -> None:
    for _ in range(100_000):  # more than the pipe holds
        channel.wake()
    start = time.monotonic()
    assert channel.receive(5000) == []
    assert time.monotonic() - start < 4.0


def test_sending_does_not_wait_for_a_reader(main: Main, channel: ZmqChannel) -> None:
    start = time.monotonic()
    for i in range(3000):
        channel.send(ControlReqOutput(request_id=str(i), success=True, message="x" * 1000))
    assert time.monotonic() - start < 5.0
    for i in range(3000):
        assert main.pull.poll(1000 * DEADLINE_S)
        assert decode_output(main.pull.recv()).request_id == str(i)

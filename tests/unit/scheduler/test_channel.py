"""The scheduler's end of the sockets: order, bursts, waking, and a main process that does not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from rollout.core.messages.io_struct import (
    AbortReqInput,
    BatchTokenOutput,
    ControlReqOutput,
    GetStateReqInput,
    PauseGenerationReqInput,
    SchedulerFailed,
    TokenizedGenerateReqInput,
    decode_input,
    decode_output,
    encode,
)
from rollout.core.messages.req_output import ReqOutput
from rollout.core.messages.unreadable import Unreadable
from rollout.core.sampling_params import SamplingParams
from rollout.scheduler import channel as channels
from rollout.scheduler.channel import ZmqChannel
from rollout.tokenizer_manager.channel import SchedulerChannel

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


def request(rid: str, siblings: int = 0) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=[1, 2],
        sampling_params=SamplingParams(sampling_seed=7),
        siblings=[(f"{rid}_{i}", 8 + i) for i in range(siblings)],
    )


def everything(channel: ZmqChannel, count: int) -> list[list[Any]]:
    """Receive `count` messages, and return them turn by turn."""
    turns, deadline = [], time.monotonic() + DEADLINE_S
    while sum(map(len, turns)) < count and time.monotonic() < deadline:
        turns.append(channel.receive(50))
    return turns


def test_engine_13_a_verb_does_not_wait_behind_requests_and_keeps_its_place(main: Main, channel: ZmqChannel) -> None:
    sent: list[Any] = [request(f"a{i}") for i in range(500)]
    sent += [AbortReqInput(rids=["a3"]), PauseGenerationReqInput(request_id="p")]
    sent += [request(f"b{i}") for i in range(500)]
    for message in sent:
        main.push.send(encode(message))
    time.sleep(0.2)  # all is there
    turns = everything(channel, len(sent))
    assert [message for turn in turns for message in turn] == sent, "in the order in which they were sent"
    assert PauseGenerationReqInput(request_id="p") in turns[0]
    assert len(turns[1]) <= 64, "requests behind it are taken in parts"


def test_messages_that_come_together_are_read_one_by_one(main: Main, channel: ZmqChannel) -> None:
    sent: list[Any] = [request(f"a{i}") for i in range(100)]
    sent += [PauseGenerationReqInput(request_id="p")]
    sent += [request(f"b{i}") for i in range(100)]
    frames = [encode(message) for message in sent]
    broken = encode(request("broken")).replace(b"input_ids", b"input_idz")
    main.push.send_multipart([*frames[:50], broken, *frames[50:]])
    time.sleep(0.2)
    turns = everything(channel, len(sent) + 1)
    found = [message for turn in turns for message in turn]
    fails = found.pop(50)
    assert isinstance(fails, Unreadable) and fails.rids == ("broken",), "only what cannot be read fails"
    assert found == sent
    assert PauseGenerationReqInput(request_id="p") in turns[0] and len(turns[1]) <= 64


def test_engine_13_a_look_goes_first(main: Main, channel: ZmqChannel) -> None:
    for i in range(1000):
        main.push.send(encode(request(f"r{i}")))
    main.push.send(encode(GetStateReqInput(request_id="look")))
    time.sleep(0.2)
    turns = everything(channel, 1001)
    assert turns[0][0] == GetStateReqInput(request_id="look") and len(turns[0]) <= 65
    assert [m.rid for turn in turns for m in turn if isinstance(m, TokenizedGenerateReqInput)] == [
        f"r{i}" for i in range(1000)
    ]


def test_engine_13_requests_that_are_left_do_not_wait_for_news(main: Main, channel: ZmqChannel) -> None:
    for i in range(200):
        main.push.send(encode(request(f"r{i}")))
    time.sleep(0.2)
    started = time.monotonic()
    assert sum(len(channel.receive(5000)) for _ in range(4)) == 200
    assert time.monotonic() - started < 4.0


def test_engine_13_samples_of_one_prompt_share_its_ids() -> None:
    message = decode_input(encode(request("r", siblings=3)))
    assert isinstance(message, TokenizedGenerateReqInput)
    samples = message.samples()
    seeds = [(sample.rid, sample.sampling_params.sampling_seed) for sample in samples]
    assert seeds == [("r", 7), ("r_0", 8), ("r_1", 9), ("r_2", 10)]
    assert all(sample.input_ids is samples[0].input_ids and not sample.siblings for sample in samples)


@pytest.mark.parametrize("secret", [None, "key"])
def test_the_outputs_of_a_large_step_leave_in_parts(main: Main, tmp_path: Path, secret: str | None) -> None:
    rids = [str(i) for i in range(2 * channels._OUTPUTS_AT_ONCE + 1)]
    channel = ZmqChannel(f"ipc://{tmp_path}/input", f"ipc://{tmp_path}/output", secret)
    channel.send(BatchTokenOutput(outputs=[ReqOutput.never_ran(rid, "v", "full") for rid in rids]))
    channel.send(SchedulerFailed(message="last"))
    messages = []
    for _ in range(4):
        assert main.pull.poll(1e3 * DEADLINE_S)
        *proof, data = main.pull.recv_multipart()
        assert proof == ([] if secret is None else [secret.encode()])
        messages.append(decode_output(data))
    channel.close()
    *parts, last = messages
    assert last == SchedulerFailed(message="last")
    outputs = [message.outputs for message in parts if isinstance(message, BatchTokenOutput)]
    assert [len(part) for part in outputs] == [channels._OUTPUTS_AT_ONCE] * 2 + [1]
    assert [output.rid for part in outputs for output in part] == rids


def test_engine_22_messages_of_strangers_over_the_network_are_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        channel = SchedulerChannel(tmp_path, remote_host="127.0.0.1")
        assert channel.remote_output_addr is not None
        context = zmq.Context()
        stranger = context.socket(zmq.PUSH)
        stranger.connect(channel.remote_output_addr)
        fake = encode(SchedulerFailed(message="fake"))
        try:
            for frames in ([fake], [b"guess", fake], [b"", fake]):
                stranger.send_multipart(frames)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.receive(), 1.0)
            rank = ZmqChannel(None, channel.remote_output_addr, channel.secret)
            rank.send(SchedulerFailed(message="true"))
            rank.close()
            assert await asyncio.wait_for(channel.receive(), 10.0) == SchedulerFailed(message="true")
        finally:
            context.destroy(linger=0)
            channel.close()

    asyncio.run(scenario())

"""`SchedulerChannel` receives every message of every rank, in order, however they come."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq

from rollout.core.errors import Unavailable
from rollout.core.messages.io_struct import AbortReqInput, GetStateReqInput, decode_input, encode
from rollout.core.messages.message import ControlReqOutput
from rollout.tokenizer_manager import channel as channels
from rollout.tokenizer_manager.channel import SchedulerChannel

COUNT = 2000


class Rank:
    """The sending end of a rank."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.set_hwm(0)
        self._push.connect(address)

    def send(self, number: int) -> None:
        self._push.send(encode(ControlReqOutput(request_id=str(number), success=True)))

    def close(self) -> None:
        self._push.close()
        self._context.term()


def run(tmp_path: Path, scenario: Callable[[SchedulerChannel, Rank], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        channel = SchedulerChannel(tmp_path)
        rank = Rank(channel.output_addr)
        try:
            await asyncio.wait_for(scenario(channel, rank), 60)
        finally:
            rank.close()
            channel.close()

    asyncio.run(main())


async def numbers(channel: SchedulerChannel, count: int) -> list[int]:
    messages = [await channel.receive() for _ in range(count)]
    return [int(message.request_id) for message in messages if isinstance(message, ControlReqOutput)]


def test_messages_that_came_before_the_first_wait_are_received(tmp_path: Path) -> None:
    async def scenario(channel: SchedulerChannel, rank: Rank) -> None:
        for number in range(COUNT):
            rank.send(number)
        time.sleep(0.3)
        assert await numbers(channel, COUNT) == list(range(COUNT))

    run(tmp_path, scenario)


def test_messages_of_another_thread_come_in_order_at_any_pace(tmp_path: Path) -> None:
    async def scenario(channel: SchedulerChannel, rank: Rank) -> None:
        def send() -> None:
            for number in range(COUNT):
                rank.send(number)
                if number % 97 == 0:
                    time.sleep(0.002)

        thread = threading.Thread(target=send)
        thread.start()
        assert await numbers(channel, COUNT) == list(range(COUNT))
        thread.join()

    run(tmp_path, scenario)


async def _in_turns(channel: SchedulerChannel, rank: Rank) -> None:
    """Send one message when the one before was received, also while the loop sends messages itself."""
    for number in range(200):
        rank.send(number)
        assert await numbers(channel, 1) == [number]


def test_one_message_at_a_time_is_received(tmp_path: Path) -> None:
    run(tmp_path, _in_turns)


def test_a_wait_that_was_cancelled_loses_nothing(tmp_path: Path) -> None:
    async def scenario(channel: SchedulerChannel, rank: Rank) -> None:
        for number in range(50):
            waiting = asyncio.create_task(channel.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            rank.send(number)
            assert await numbers(channel, 1) == [number]

    run(tmp_path, scenario)


def test_an_inbox_that_takes_one_message_a_report_would_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_one(self: Any) -> None:
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._came.append(self._socket.recv_multipart(zmq.NOBLOCK))
        if self._came and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    monkeypatch.setattr(channels._Inbox, "_take", take_one)

    async def scenario(channel: SchedulerChannel, rank: Rank) -> None:
        for number in range(COUNT):
            rank.send(number)
        time.sleep(0.3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(numbers(channel, COUNT), 2)

    run(tmp_path, scenario)


class Engine:
    """The receiving end of an engine."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.pull = self._context.socket(zmq.PULL)
        self.pull.set_hwm(0)
        self.pull.connect(address)

    async def received(self) -> list[list[bytes]]:
        """Return what comes within a while, each message of ZMQ as its frames."""
        found: list[list[bytes]] = []
        for _ in range(20):
            await asyncio.sleep(0.01)
            while self.pull.poll(0):
                found.append(self.pull.recv_multipart())
        return found

    def close(self) -> None:
        self.pull.close()
        self._context.term()


def aborts(frames: list[bytes]) -> list[str]:
    messages = [decode_input(data) for data in frames]
    return [rid for message in messages if isinstance(message, AbortReqInput) for rid in message.rids]


def send_together(tmp_path: Path, late: bool) -> list[list[str]]:
    """Send messages in two turns, and return the ids in each message that the engine gets."""

    async def main() -> list[list[str]]:
        channel = SchedulerChannel(tmp_path)
        engine = Engine(channel.input_addrs[0])
        try:
            await asyncio.sleep(0.1)
            if late:  # the engine is lost between the calls and the end of the turn
                channel.send(AbortReqInput(rids=["0"]), AbortReqInput(rids=["1"]))
                engine.close()
                time.sleep(0.1)
                await asyncio.sleep(0.1)
                with pytest.raises(Unavailable):
                    channel.send(AbortReqInput(rids=["refused"]))
                engine = Engine(channel.input_addrs[0])
                await asyncio.sleep(0.1)
            else:
                channel.send(AbortReqInput(rids=["0"]))
                channel.send(AbortReqInput(rids=["1"]), AbortReqInput(rids=["2"]))
                await asyncio.sleep(0)
            channel.send(AbortReqInput(rids=["3"]))
            return [aborts(frames) for frames in await engine.received()]
        finally:
            engine.close()
            channel.close()

    return asyncio.run(main())


def test_messages_of_a_turn_leave_together_and_in_order(tmp_path: Path) -> None:
    assert send_together(tmp_path, late=False) == [["0", "1", "2"], ["3"]]


def test_messages_to_an_engine_that_was_lost_wait_for_it(tmp_path: Path) -> None:
    assert send_together(tmp_path, late=True) == [["0", "1"], ["3"]]


def test_a_verb_leaves_at_once_with_what_came_before_it(tmp_path: Path) -> None:
    async def scenario(channel: SchedulerChannel, rank: Rank) -> None:
        engine = Engine(channel.input_addrs[0])
        try:
            await asyncio.sleep(0.1)
            channel.send(AbortReqInput(rids=["0"]))
            assert not engine.pull.poll(50), "the turn of the event loop has not ended"
            channel.send(GetStateReqInput(request_id="look"))
            channel.send(AbortReqInput(rids=["1"]))
            assert engine.pull.poll(10_000)
            before, verb = engine.pull.recv_multipart()
            assert aborts([before]) == ["0"] and isinstance(decode_input(verb), GetStateReqInput)
            assert [aborts(frames) for frames in await engine.received()] == [["1"]]
        finally:
            engine.close()

    run(tmp_path, scenario)

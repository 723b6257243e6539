"""A burst of requests leaves the event loop to others: few sockets are read, and few connections looked at, at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest

from rollout.server.connections import SWEEP_TICKS, BoundedServer
from rollout.server.event_loop import EVENTS_AT_ONCE, FewAtOnce, new_event_loop

COUNT = 5 * EVENTS_AT_ONCE + 1


@contextlib.contextmanager
def readable(count: int) -> Any:
    """Yield sockets that all have something to read."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count)]
        for own, other in pairs:
            stack.enter_context(own)
            stack.enter_context(other).send(b"x")
        yield [own for own, _ in pairs]


def reads_of_each_pass(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> list[int]:
    """Return how many of `COUNT` sockets are read in each pass, until all of them are."""

    async def scenario(sockets: list[socket.socket]) -> list[int]:
        loop, read, found = asyncio.get_running_loop(), 0, []

        def take(own: socket.socket) -> None:
            nonlocal read
            own.recv(1)
            loop.remove_reader(own)
            read += 1

        for own in sockets:
            loop.add_reader(own, take, own)
        while read < COUNT:
            before = read
            await asyncio.sleep(0)
            found.append(read - before)
        return found

    with readable(COUNT) as sockets, asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(asyncio.wait_for(scenario(sockets), 20.0))


def test_a_pass_reads_few_sockets() -> None:
    assert 0 < max(reads_of_each_pass(new_event_loop)) <= EVENTS_AT_ONCE


def test_the_count_sees_a_loop_that_reads_all() -> None:
    assert max(reads_of_each_pass(asyncio.new_event_loop)) > EVENTS_AT_ONCE


def test_sockets_that_are_not_read_do_not_hide_the_others() -> None:
    with readable(COUNT) as sockets, FewAtOnce() as selector:
        for own in sockets:
            selector.register(own, 1)
        told = [{key.fd for key, _ in selector.select(0)} for _ in range(6)]
        assert [len(part) for part in told] == [EVENTS_AT_ONCE] * 6
        assert len(set.union(*told)) == COUNT


class Client:
    """A connection that has been sending for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.num_looks, self.transport = seconds, 0, self
        self.is_aborted = False

    def seconds_sending(self, now: float) -> float:
        self.num_looks += 1
        return self.seconds

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("count", [1, 7, 95])
def test_each_connection_is_looked_at_once_a_second_and_few_in_a_tick(count: int) -> None:
    async def ticks(number: int) -> None:
        for _ in range(number):
            await server.on_tick(1)

    server = BoundedServer(None, most=10, receive_timeout_s=5.0)
    server.servers = []
    clients = [Client(6.0 if index % 2 else 4.0) for index in range(count)]
    server.server_state.connections = set(clients)  # type: ignore[arg-type]
    asyncio.run(ticks(1))
    assert sum(client.num_looks for client in clients) == -(-count // SWEEP_TICKS)
    asyncio.run(ticks(SWEEP_TICKS - 1))
    assert min(client.num_looks for client in clients) >= 1
    assert [client.is_aborted for client in clients] == [client.seconds > 5.0 for client in clients]

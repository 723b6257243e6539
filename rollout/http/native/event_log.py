"""`EventLog`: the numbered events of a stream, for one reader after another.

generator of a door ---> one event at a time ---> the log ---> a reader of event k, k + 1, ..
                         made for a reader, or, once it has left, as they come
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from rollout.core.errors import BadRequest, Conflict
from rollout.http.io import SseForm, framed


class TakenOver(Conflict):
    """Another reader began.  `last`: the number of the last event that this one got, -1 if it got none."""

    kind = Conflict.__name__

    def __init__(self, last: int) -> None:
        super().__init__("another connection reads this stream by now; a stream has one reader")
        self.last = last


MAX_LOG_BYTES = 64 << 20
"""Bytes of the newest events that a log keeps: a stream of many small events takes more than its request."""


class EventLog:
    """The events of one stream as they were sent, and the ones to come.  Use from one event loop.

    An event is made in a task of its own, so that a reader whose connection is cut takes none with it.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], form: SseForm, *, shows_numbers: bool) -> None:
        """Take in a stream and its form.  `shows_numbers`: events get their numbers as ids of server-sent events."""
        self.form = form._replace(before=b"", after=b"", end=b"")  # of a reader, whose events have all of it
        self.num_bytes = 0
        self.is_over = False
        self._source = framed(events, form)
        self._shows_numbers = shows_numbers
        self._first = 0  # the number of the oldest event that is kept
        self._events: deque[bytes] = deque()
        self._making: asyncio.Task[None] | None = None
        self._running_on: asyncio.Task[None] | None = None
        self._reader: object | None = None

    @property
    def end(self) -> int:
        """The number of the next event."""
        return self._first + len(self._events)

    def require(self, number: int) -> None:
        """Raise `BadRequest` unless the event of this number is kept, or is the next one."""
        if number > self.end:
            raise BadRequest(f"event {number} was asked for, but the stream has {self.end} events so far")
        if number < self._first:
            raise BadRequest(f"event {number} is not kept any more: the oldest one is {self._first}")

    async def read(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from `number` on, until the stream's end.  Raises `TakenOver` once another reader begins."""
        reader = self._reader = object()
        while True:
            if reader is not self._reader:
                raise TakenOver(number - 1)
            if number < self.end:
                self.require(number)
                yield self._events[number - self._first]
                number += 1
                await asyncio.sleep(0)  # events that are known come without a wait, and others want their turn
            elif self.is_over:
                return
            else:
                await self._more()

    def run_on(self) -> None:
        """Make the rest of the events without a reader, until one begins."""
        self._reader = None
        if self._running_on is None:
            self._running_on = asyncio.create_task(self._run_on())

    async def _run_on(self) -> None:
        try:
            while not self.is_over and self._reader is None:
                await self._more()
        finally:
            self._running_on = None

    async def _more(self) -> None:
        """Wait until an event was made, or the stream is over."""
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        await asyncio.wait([self._making])

    async def _make(self) -> None:
        try:
            event = await anext(self._source, None)
        except BaseException:
            self.is_over = True
            raise
        finally:
            self._making = None
        if event is None:
            self.is_over = True
            return
        if self._shows_numbers:
            event = b"id: %d\n" % self.end + event
        self._events.append(event)
        self.num_bytes += len(event)
        while self.num_bytes > MAX_LOG_BYTES and len(self._events) > 1:
            self.num_bytes -= len(self._events.popleft())
            self._first += 1

"""Streams and events as CUDA has them, without a device: enqueued work happens when the host waits for it.

    stream A   work  work  event x  work         x.synchronize() does the first two; what is read before is what was
    stream B   wait for x, work                  there before them

One thread, and always the same order: a race shows as a stale value, every time.  The traps are CUDA's: work of
different streams has no order but by events; to wait for an event that was never recorded is to wait for nothing; an
event that is recorded again stands for the later record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch


class Stream:
    """Work in its order, of which the first `done` was done."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self.done = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Run what is enqueued from now on after the event as it stands now."""
        stream, end = event.place
        if stream is not None:
            self.enqueue(lambda: stream.run(end))

    def synchronize(self) -> None:
        self.run(self.end)

    @property
    def end(self) -> int:
        return len(self._work)

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self._work[self.done - 1]()


class Event:
    """Made with the arguments of `torch.cuda.Event`, which change nothing here."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.place: tuple[Stream | None, int] = (None, 0)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or torch.cuda.current_stream()  # type: ignore[assignment]
        assert isinstance(stream, Stream)
        self.place = stream, stream.end

    def synchronize(self) -> None:
        stream, end = self.place
        if stream is not None:
            stream.run(end)

    def query(self) -> bool:
        stream, end = self.place
        return stream is None or stream.done >= end


class Streams:
    """Streams in the place of `torch.cuda`'s functions while `installed`."""

    def __init__(self) -> None:
        self.all = [Stream()]
        self.current = self.all[0]

    def new(self) -> Stream:
        self.all.append(Stream())
        return self.all[-1]

    def current_stream(self, device: torch.device | str | int | None = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        for stream in self.all:
            stream.synchronize()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("current_stream", "stream", "synchronize"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "Event", Event)

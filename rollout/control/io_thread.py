"""`IoThread`: the thread of the I/O parts of weight verbs, which gets less of the processor than steps.

On Linux niceness belongs to a thread, and to the threads that it starts.  A process cannot take it back.  An engine
without steps has nothing to give way to, and its trainer may compute on the same machine: a nice thread would wait for
each of the trainer's threads.  So the thread becomes nice once there are steps, and another one follows it when there
are none.  On a device the thread is always nice: it has a stream of its own there, which it keeps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from weight_sync.staging import use_own_stream

T = TypeVar("T")
_NICENESS = 15
_here = threading.local()


def give_way() -> None:
    """Give the calling thread, if it is an I/O thread, less of the processor than steps get, from now on.

    Threads that it starts get as little.
    """
    if getattr(_here, "is_eager", False):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        _here.is_eager = False


def _settle_in(device: torch.device) -> None:
    _here.is_eager = True
    use_own_stream(device)


class IoThread:
    """One thread at a time, for one piece of work after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_nice = False  # as of the last work
        self._pool = self._new_pool()

    def submit(self, work: Callable[[], T], *, gives_way: bool) -> Future[T]:
        """Start `work` once the work before is over.  `gives_way`: there are steps, or threads that it starts stay."""
        if self._is_nice and not gives_way and self._device.type == "cpu":
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()
        return self._pool.submit(self._run, work, gives_way=gives_way)

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "weight-io", initializer=_settle_in, initargs=(self._device,))

    def _run(self, work: Callable[[], T], *, gives_way: bool) -> T:
        if gives_way or self._device.type != "cpu":
            give_way()
        try:
            return work()
        finally:
            self._is_nice = not _here.is_eager

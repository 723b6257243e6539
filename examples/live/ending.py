"""The end of a run: by itself, by an error, or by a signal and then at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, ParamSpec, TypeVar

import httpx
from rich.console import Console

from lockstep_rl import LockstepError, WeightSyncError

P = ParamSpec("P")
R = TypeVar("R")
INTERRUPTED = 130
# Errors with a message for the user.  Any other is a fault of the example, and has its traceback.
EXPECTED = (LockstepError, WeightSyncError, TimeoutError, httpx.HTTPError)


def status_of(run: Callable[[Path], None], name: str, console: Console) -> int:
    """Call `run` with a temporary folder; return 0 if it returned, 1 if something broke, 130 if interrupted."""
    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix=f"lockstep-{name}-") as folder:
            run(Path(folder))
    except KeyboardInterrupt:
        console.print("interrupted; the example's servers have been stopped")
        return INTERRUPTED
    except Exception as error:
        cause = first_error(error)
        if not isinstance(cause, EXPECTED):
            raise
        text = f"{name}: error: {type(cause).__name__}: {cause}"
        console.print(text, style="red", markup=False, highlight=False)
        return 1
    return 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM act like Ctrl-C inside the block, so that every way out ends the server.

    A shell has the jobs that a script starts in the background ignore SIGINT; they end by it here, too.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # an event loop has its own, which cancels the main task
        if not callable(handler):
            raise KeyboardInterrupt
        handler(number, frame)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def first_error(error: BaseException) -> BaseException:
    """Return the error itself; of a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def in_thread(call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call in a thread of its own, as `asyncio.to_thread` does; but no end of the event loop waits for the thread.

    A step of a trainer takes many seconds on a slow machine, and an interrupted run has no use for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.done():  # else the caller was cancelled
            set_outcome()

    def run() -> None:
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            outcome = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future


def leave(status: int) -> NoReturn:
    """End the process at once, with what still runs in threads.

    The interpreter would first tear torch and transformers down, which takes over a second of a core.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

"""The end of an example's run: what becomes one line, what keeps its traceback, which status it has."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from examples.live.ending import in_thread, status_of
from examples.live.layers import LayersError
from lockstep_rl import LockstepError, WeightSyncError


def raising(error: BaseException) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (LockstepError("no [model] here"), "example-x: error: LockstepError: no [model] here"),
        (WeightSyncError("refused"), "example-x: error: WeightSyncError: refused"),
        (TimeoutError("120 s"), "example-x: error: TimeoutError: 120 s"),
        (httpx.ConnectError("refused"), "example-x: error: ConnectError: refused"),
        (LayersError("3 layers"), "example-x: error: LayersError: 3 layers"),
        (ExceptionGroup("a", [ExceptionGroup("b", [LockstepError("in")])]), "example-x: error: LockstepError: in"),
    ],
)
def test_an_expected_error_is_one_line(error: Exception, line: str) -> None:
    output = io.StringIO()
    assert status_of(raising(error), "example-x", Console(file=output, width=118)) == 1
    assert output.getvalue() == line + "\n"


@pytest.mark.parametrize("error", [TypeError("a fault"), ExceptionGroup("a", [TypeError("a fault")])])
def test_a_fault_of_the_example_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        status_of(raising(error), "example-x", Console(file=io.StringIO()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_removes_its_folder(number: int) -> None:
    output, folders = io.StringIO(), []
    before = signal.getsignal(number)

    def run(folder: Path) -> None:
        folders.append(folder)
        (folder / "server.log").write_text("")
        os.kill(os.getpid(), number)

    assert status_of(run, "example-x", Console(file=output)) == 130
    assert output.getvalue().startswith("interrupted")
    assert not folders[0].exists() and signal.getsignal(number) is before


def test_a_run_that_returns_is_well() -> None:
    output = io.StringIO()
    assert status_of(lambda folder: None, "example-x", Console(file=output)) == 0
    assert output.getvalue() == ""


def test_a_call_in_a_thread_returns_or_raises() -> None:
    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
    assert asyncio.run(in_thread(int, "11", base=2)) == 3
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divmod, 7, 0))


def test_a_cancelled_run_does_not_wait_for_its_thread() -> None:
    started, released = threading.Event(), threading.Event()

    def step() -> None:
        started.set()
        released.wait(20.0)

    async def run() -> None:
        task = asyncio.create_task(in_thread(step))
        while not started.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    start = time.monotonic()
    try:
        asyncio.run(run())
        assert time.monotonic() - start < 10.0
    finally:
        released.set()


LEAVING = """
import atexit, sys, threading
from examples.live.ending import leave
atexit.register(print, "torn down")
threading.Thread(target=threading.Event().wait).start()
print("written", end="")
leave(130)
"""


def test_a_process_leaves_at_once_with_what_it_wrote() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVING], stdout=subprocess.PIPE, text=True, timeout=60.0)
    assert (ended.returncode, ended.stdout) == (130, "written")

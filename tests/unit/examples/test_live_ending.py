"""The end of an example's run: what becomes one line, what keeps its traceback, which status it has."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from examples.live.ending import status_of
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

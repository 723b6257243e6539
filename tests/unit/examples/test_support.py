"""The progress of examples: lines where there is no terminal, and never a long silence."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from examples.support import progress as module
from examples.support.progress import progress


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


def console(output: io.StringIO) -> Console:
    return Console(file=output, width=118, force_terminal=False)


def test_a_run_that_reports_often_prints_seldom(output: io.StringIO) -> None:
    with progress(console(output)) as report:
        for done in range(1, 201):
            report("steps", done, 200, f"loss {1 / done:.3f}")
    assert output.getvalue().splitlines() == ["steps 200/200: loss 0.005"]


def test_a_line_is_due_after_its_time(output: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.0)
    with progress(console(output)) as report:
        report("steps", 1, 200, "loss 1.0")
        report("steps", 2, 200, "loss 0.5")
    assert output.getvalue().splitlines() == ["steps 1/200: loss 1.0", "steps 2/200: loss 0.5"]


def test_silence_ends_by_itself(output: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.3)
    with progress(console(output)) as report:
        report("steps", 7, 200, "loss 1.0")
        deadline = time.monotonic() + 20.0
        while "at work" not in output.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert output.getvalue().splitlines()[0].startswith("steps 7/200: loss 1.0 (at work for ")


def test_lines_stay_away_no_longer_than_ten_seconds() -> None:
    assert module.LINE_EVERY_S < module.SILENCE_S < 10.0

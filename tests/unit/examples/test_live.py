"""The progress of examples: bars on a terminal, lines elsewhere, and never a long silence."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from examples.live import progress as module
from examples.live.progress import Shown, progress


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


def console(output: io.StringIO, *, is_terminal: bool = False) -> Console:
    return Console(file=output, width=118, force_terminal=is_terminal)


def wait_for_lines(output: io.StringIO, count: int) -> list[str]:
    deadline = time.monotonic() + 20.0
    while len(output.getvalue().splitlines()) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return output.getvalue().splitlines()


def test_a_run_that_reports_often_prints_seldom(output: io.StringIO) -> None:
    with progress(console(output)) as shown:
        for done in range(1, 201):
            shown.report("steps", done, 200, f"loss {1 / done:.3f}")
    assert output.getvalue().splitlines() == ["[ 0:00] steps 200/200: loss 0.005"]


def test_a_line_is_due_after_its_time(output: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.0)
    with progress(console(output)) as shown:
        shown.report("steps", 1, 200, "loss 1.0")
        shown.report("steps", 2, 200, "loss 0.5")
    lines = output.getvalue().splitlines()
    assert lines == ["[ 0:00] steps 1/200: loss 1.0", "[ 0:00] steps 2/200: loss 0.5"]


def test_silence_ends_by_itself(output: io.StringIO) -> None:
    with progress(console(output), quiet_s=0.3) as shown:
        shown.report("steps", 7, 200, "loss 1.0")
        lines = wait_for_lines(output, 1)
    assert lines[0] == "[ 0:00] steps 7/200: loss 1.0 ..."


def test_progress_is_repeated_when_nothing_is_printed(output: io.StringIO) -> None:
    with progress(console(output), quiet_s=0.05) as shown:
        shown.line("first")
        shown.doing("waiting")
        lines = wait_for_lines(output, 3)
    assert lines[:3] == ["[ 0:00] first", "[ 0:00] waiting ...", "[ 0:00] waiting ..."]


def test_lines_stay_away_no_longer_than_ten_seconds() -> None:
    assert module.LINE_EVERY_S < module.QUIET_S < 10.0


def test_a_terminal_has_bars_and_a_row_of_the_present_work(output: io.StringIO) -> None:
    def run(shown: Shown) -> None:
        shown.doing("sampling")
        shown.report("steps", 1, 2, "loss 1.0")
        shown.line("an event")
        shown.report("steps", 2, 2, "loss 0.5")

    with progress(console(output, is_terminal=True)) as shown:
        run(shown)
    written = output.getvalue()
    assert "[ 0:00] an event" in written and "2/2" in written and "loss 0.5" in written
    assert "━" in written, "a bar"
    assert "steps 2/2: loss 0.5" not in written, "the line of a file"

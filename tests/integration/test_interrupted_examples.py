"""SIGINT amid a rollout, a training step and a refresh: the example ends soon, and nothing of it is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.abuse.usage import process_tree
from tests.interrupted_example import MOMENTS

pytestmark = pytest.mark.full
END_S = 10.0


@pytest.mark.parametrize("is_ignored", [False, True], ids=["terminal", "background"])
@pytest.mark.parametrize(("example", "moment"), list(MOMENTS))
def test_an_interrupt_ends_it_in_time(example: str, moment: str, is_ignored: bool, tmp_path: Path) -> None:
    """A shell lets the background jobs of a script ignore SIGINT: `background`."""
    command = [sys.executable, "-m", "tests.interrupted_example", example, moment, str(tmp_path)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler)
    try:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with running:
        try:
            assert running.stdout is not None
            lines = []
            while lines[-1:] != ["NOW\n"]:
                lines.append(running.stdout.readline())
                assert lines[-1], "".join(lines)
            started = process_tree(running.pid)
            assert len(started) >= 3, "the example, its server and the engine"
            start = time.monotonic()
            running.send_signal(signal.SIGINT)
            out, _ = running.communicate(timeout=60.0)
            seconds = time.monotonic() - start
        finally:
            running.kill()
    assert running.returncode == 130, out
    assert "interrupted" in out and "Traceback" not in out, out
    assert seconds < END_S
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]

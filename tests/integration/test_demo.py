"""`lockstep demo` as a user runs it, and what it does when a process fails or it is interrupted."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo import run
from examples.demo.checks import Row
from examples.demo.display import make_display, results_table
from examples.demo.messages import Failure, Progress, encode
from rollout.server.child_process import ChildProcess

DEMO = [sys.executable, "-m", "rollout.cli.main", "demo"]
SMALL = ["--size", "tiny", "--prompts", "8", "--samples", "4", "--max-new-tokens", "24"]
DEADLINE_S = 150.0


def processes_naming(text: str) -> list[str]:
    """Return the command lines of running processes that contain `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.05)


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *words], capture_output=True, text=True, timeout=DEADLINE_S)


def test_demo_passes_and_leaves_nothing(tmp_path: Path) -> None:
    result = demo(*SMALL, "--workdir", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"all 17 checks ok, \d+ s in all", result.stdout)
    assert "FAILED" not in result.stdout and "…" not in result.stdout
    assert re.search(r"KL\(engine, trainer\), engine numerics +│ +0 │ +exactly 0 │ ok", result.stdout)
    shown, serve, watch = result.stdout.splitlines()[-3:]
    assert shown.startswith("Shown: ") and watch.endswith("/dashboard")
    assert serve.endswith(f"lockstep serve {tmp_path / 'checkpoint'} --enable-return-routed-experts")
    for phase in (
        "write a checkpoint",
        "start the server",
        "score version 0",
        "refresh to version 1",
        "score version 1",
    ):
        assert result.stdout.count(f"{phase}: done in") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "server.log", "trainer.log"}
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "gpt_oss", "llama"])
def test_demo_of_other_families(tmp_path: Path, family: str) -> None:
    """The demo serves and samples each family, scores with routes forced, takes a step and refreshes."""
    result = demo(*SMALL, "--family", family, "--workdir", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"all \d+ checks ok", result.stdout) and "FAILED" not in result.stdout


@pytest.mark.full
def test_a_step_of_size_zero_fails_the_checks(tmp_path: Path) -> None:
    result = demo(*SMALL, "--workdir", str(tmp_path), "--learning-rate", "0")
    assert result.returncode == 1, result.stdout + result.stderr
    failed = [line for line in result.stdout.splitlines() if line.rstrip(" │").endswith("FAILED")]
    assert [next(iter(re.findall(r"│ +(\S.*?) +│", line))) for line in failed] == [
        "loss of the same samples, before and after",
        "tensors that the step changed",
        "mean |Δ log-prob|, weights before the step, forced",
    ]
    assert "3 of 17 checks FAILED" in result.stdout


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_every_process(tmp_path: Path, number: int) -> None:
    words = [*SMALL, "--workdir", str(tmp_path), "--steps", "8", "--max-new-tokens", "200"]
    with subprocess.Popen([*DEMO, *words], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("load the trainer's model"):
                break
        assert len(processes_naming(str(tmp_path))) >= 4  # the demo, the server, its scheduler, the trainer
        os.kill(process.pid, number)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == run.INTERRUPTED, rest
    assert "interrupted" in rest
    wait_until(lambda: processes_naming(str(tmp_path)) == [])


@pytest.mark.full
def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = demo(*SMALL, "--workdir", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "the server ended with status 1" in result.stdout and "choose another --port" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.full
def test_a_full_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine.txt").write_text("keep me")
    result = demo(*SMALL, "--workdir", str(tmp_path))
    assert result.returncode == 1 and "is not an empty folder" in result.stdout
    assert (tmp_path / "checkpoint" / "mine.txt").read_text() == "keep me"


# --- following two processes ---------------------------------------------------------------------------------------


def follow(tmp_path: Path, trainer_code: str, server_code: str = "import time; time.sleep(60)") -> None:
    """Call `run._follow` with two real processes that run the given code."""
    display = make_display(Console(file=io.StringIO()))
    with (
        ChildProcess("server", [sys.executable, "-c", server_code], tmp_path / "server.log") as server,
        ChildProcess(
            "trainer", [sys.executable, "-c", trainer_code], tmp_path / "trainer.log", reads_output=True
        ) as trainer,
    ):
        run._follow(trainer, server, display)


def says(*lines: bytes, then: str = "") -> str:
    return f"import os, sys, time\nfor line in {lines!r}: os.write(1, line)\n{then}"


def test_a_server_that_dies_is_noticed_and_quoted(tmp_path: Path) -> None:
    server = "import sys, time; time.sleep(0.5); print('out of luck', file=sys.stderr); sys.exit(3)"
    with pytest.raises(run.DemoError, match=r"server ended with status 3(?s:.*)out of luck"):
        follow(tmp_path, says(encode(Progress("x", 0, 1)), then="time.sleep(60)"), server)


def test_a_trainer_that_dies_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(run.DemoError, match=r"trainer ended with status 1(?s:.*)ValueError: no"):
        follow(tmp_path, says(then="raise ValueError('no')"))


def test_a_trainers_failure_is_reported(tmp_path: Path) -> None:
    with pytest.raises(run.DemoError, match="the trainer failed: refused"):
        follow(tmp_path, says(encode(Failure("refused"))))


def test_what_is_no_message_is_refused(tmp_path: Path) -> None:
    with pytest.raises(run.DemoError, match="the trainer sent an unexpected message: "):
        follow(tmp_path, says(b"hello\n"))


def test_a_trainer_that_hangs_meets_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TRAINER_TIMEOUT_S", 1.0)
    with pytest.raises(run.DemoError, match="did not finish within 1 s"):
        follow(tmp_path, "import time; time.sleep(60)")


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.server.child_process.STOP_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with ChildProcess("child", [sys.executable, "-c", code], tmp_path / "log", reads_output=True) as child:
        assert child.next_line(10.0) == b"up\n"
        started = time.monotonic()
        assert child.stop() == -signal.SIGKILL
        assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("width", [80, 118])
def test_the_table_keeps_values_bounds_and_verdicts_at_any_width(width: int) -> None:
    rows = [
        Row(
            "A section",
            "a fact with a name that is long enough to be cut off",
            "+0.00007, -0.00155",
            "<= 0.001942",
            True,
        ),
        Row("A section", "another fact", "1", "> 2", False),
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(results_table(rows))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text and max(len(line) for line in text.splitlines()) <= width
    for word in ("+0.00007, -0.00155", "<= 0.001942", "ok", "FAILED", "off"):
        assert word in text


def test_bars_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with make_display(console) as display:
        display.update("roll out", 1, 4)
        display.update("roll out", 4, 4)
        display.update("start the server", 0, None)
        display.finish("start the server")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "roll out" in text and "100%" in text

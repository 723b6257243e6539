"""benchmarks/peers: workers as real processes, and environments as real environments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.peers.environments import ROOT, Environment, InstallError, install
from benchmarks.peers.measure import Fleet, ShapeRun
from benchmarks.peers.process import Worker, WorkerError

pytestmark = pytest.mark.full

START_S = 60.0
PROMPTS = [[1, 2]]


@contextmanager
def _worker(tmp_path: Path, **settings: str) -> Iterator[Worker]:
    command = [sys.executable, "-m", "tests.peer_worker", json.dumps(settings)]
    worker = Worker(command, ROOT, {}, tmp_path / "log")
    try:
        yield worker
    finally:
        worker.kill()


def _generate(worker: Worker, new_tokens: int, timeout_s: float = 20.0) -> dict:
    return worker.ask({"op": "generate", "prompts": PROMPTS, "max_new_tokens": new_tokens}, timeout_s)


def _wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _members(group: int) -> list[int]:
    """Return the ids of the living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_worker_answers_and_what_libraries_print_goes_to_the_log(tmp_path: Path) -> None:
    with _worker(tmp_path) as worker:
        assert worker.receive(START_S) == {"about": "counter"}
        assert _generate(worker, 3)["tokens"] == [[0, 1, 2]]
        with pytest.raises(WorkerError, match="out of tune"):
            worker.ask({"op": "tune", "prompts": PROMPTS, "max_new_tokens": 1}, 20.0)
        assert _generate(worker, 1)["tokens"] == [[0]]
        worker.close()
        assert "noise of a library" in (tmp_path / "log").read_text()


def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    refused = pytest.raises(WorkerError, match=r"ValueError: no such weights \(log: .*log\)")
    with _worker(tmp_path, fail="no such weights") as worker, refused:
        worker.receive(START_S)


def test_death_and_silence_end_the_wait(tmp_path: Path) -> None:
    with _worker(tmp_path) as worker:
        worker.receive(START_S)
        with pytest.raises(WorkerError, match="ended with status 3"):
            _generate(worker, 99)
        with pytest.raises(WorkerError, match="it has ended"):
            _generate(worker, 1)
    with _worker(tmp_path) as worker:
        worker.receive(START_S)
        with pytest.raises(WorkerError, match="no answer within"):
            _generate(worker, 98, timeout_s=0.3)


def test_freezing_stops_the_whole_group_and_thawing_continues_it(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    with _worker(tmp_path, beat=str(beat)) as worker:
        worker.receive(START_S)
        _wait(lambda: beat.exists() and beat.stat().st_size > 2)
        worker.freeze()
        time.sleep(0.2)
        size = beat.stat().st_size
        time.sleep(0.4)
        assert beat.stat().st_size == size
        worker.thaw()
        _wait(lambda: beat.stat().st_size > size)
        assert _generate(worker, 1)["tokens"] == [[0]]


@pytest.mark.parametrize("end", [Worker.close, Worker.kill])
def test_nothing_of_a_stopped_group_is_left(tmp_path: Path, end: Callable[[Worker], None]) -> None:
    beat = tmp_path / "beat"
    with _worker(tmp_path, beat=str(beat)) as worker:
        worker.receive(START_S)
        worker.freeze()
        assert len(_members(worker.pid)) == 2
        end(worker)
        _wait(lambda: not _members(worker.pid))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_run_leaves_no_process_and_no_file(tmp_path: Path, interruption: type[BaseException]) -> None:
    beat = tmp_path / "beat"
    with _worker(tmp_path, beat=str(beat)) as worker:
        worker.receive(START_S)
        worker.freeze()
        with pytest.raises(interruption), Fleet(ShapeRun("S"), Console(quiet=True)) as fleet:
            fleet.workers["stopped"] = worker
            temporary = fleet.temporary
            assert temporary.is_dir()
            raise interruption
        _wait(lambda: not _members(worker.pid))
        assert not temporary.exists()


def test_what_is_measured_comes_after_a_request_that_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[list[int]], int]] = []
    ask = Worker.ask

    def note(worker: Worker, request: dict, timeout_s: float) -> dict:
        asked.append((request["prompts"], request["max_new_tokens"]))
        return ask(worker, request, timeout_s)

    monkeypatch.setattr(Worker, "ask", note)
    with _worker(tmp_path) as worker, Fleet(ShapeRun("S"), Console(quiet=True)) as fleet:
        worker.receive(START_S)
        worker.freeze()
        fleet.workers["peer"] = worker
        requests = [{"op": "generate", "prompts": PROMPTS, "max_new_tokens": count} for count in (2, 5)]
        replies = fleet.ask_awake("peer", [[7, 8, 9]], requests)
        assert [reply and reply["tokens"] for reply in replies] == [[[0, 1]], [[0, 1, 2, 3, 4]]]
        assert asked == [([[7, 8, 9]], 1), (PROMPTS, 2), (PROMPTS, 5)]
        _wait(lambda: Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        fails = {"op": "generate", "prompts": PROMPTS, "max_new_tokens": 99}
        assert fleet.ask_awake("peer", PROMPTS, [fails, fails]) == [None, None] and not fleet.workers


def test_a_worker_that_fails_is_left_out_loudly(tmp_path: Path) -> None:
    out = StringIO()
    run = ShapeRun("S")
    with _worker(tmp_path) as worker, Fleet(run, Console(file=out, width=200)) as fleet:
        worker.receive(START_S)
        fleet.workers["peer"] = worker
        assert fleet.ask("peer", {"op": "tune", "prompts": PROMPTS, "max_new_tokens": 1}) is None
        assert fleet.ask("peer", {"op": "generate", "prompts": PROMPTS, "max_new_tokens": 1}) is None
        assert not fleet.workers and "out of tune" in run.missing["peer"]
    assert "peer is left out of shape S" in out.getvalue()


def test_a_worker_does_not_outlive_its_parent(tmp_path: Path) -> None:
    script = (
        "import json, os, signal, sys\nfrom pathlib import Path\nfrom benchmarks.peers.process import Worker\n"
        "command = [sys.executable, '-m', 'tests.peer_worker', '{}']\n"
        "worker = Worker(command, Path.cwd(), {}, Path(sys.argv[1]))\nworker.receive(60.0)\nworker.freeze()\n"
        "print(worker.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    _wait(lambda: not _members(int(done.stdout)))


def test_an_environment_is_made_once_and_again_when_its_steps_change(tmp_path: Path) -> None:
    said: list[str] = []
    environment = Environment("bare", (), parent=tmp_path)
    install(environment, said.append)
    assert environment.python.exists() and len(said) == 1
    install(environment, said.append)
    assert len(said) == 1
    install(Environment("bare", (("uninstall", "--yes", "setuptools"),), parent=tmp_path), said.append)
    assert len(said) == 3


def test_a_failed_install_is_one_line_and_is_tried_again(tmp_path: Path) -> None:
    step = ("install", "--no-index", "--find-links", str(tmp_path), "a-package-that-nobody-has")
    environment = Environment("broken", (step,), parent=tmp_path)
    for _ in range(2):
        said: list[str] = []
        with pytest.raises(InstallError) as caught:
            install(environment, said.append)
        assert "\n" not in str(caught.value) and "a-package-that-nobody-has" in str(caught.value)
        assert len(said) == 2
    assert os.access(environment.folder / "install.log", os.R_OK)

"""examples/fleet as a user runs it: real Ray, the real router, an engine killed and replaced; and interrupted.

It runs in its own environment, `.venv-fleet`, as the other frameworks here stand Ray in.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.framework import Framework
from tests.server_process import alive

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-fleet" / "bin" / "python"
PINS = dict(
    line.split("==") for line in (ROOT / "examples/fleet/requirements.txt").read_text().splitlines() if "==" in line
)
FRAMEWORK = Framework(
    name="Ray and vllm-router (examples/fleet)",
    packages=tuple(f"{name} {PINS[name]}" for name in ("ray", "vllm-router")),
    flags={"enable_return_routed_experts": True, "max_kv_version_lag": 0},
)
RUN_S = 200.0
END_S = 60.0
MARK = "LOCKSTEP_FLEET_TEST"


@pytest.fixture(scope="module")
def events_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet") / "events.json"


@pytest.fixture(scope="module")
def finished(events_file: Path) -> dict[str, Any]:
    """The events and facts of a short run."""
    words = ["--seconds", "12", "--release-every", "2", "--events", str(events_file)]
    run = subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all checks ok" in run.stdout and "FAILED" not in run.stdout
    return json.loads(events_file.read_text())


def command(*words: str) -> list[str]:
    assert PYTHON.exists(), "the fleet has an environment of its own: make .venv-fleet/.installed"
    return [str(PYTHON), "-m", "examples.fleet.run", *words]


def test_the_replacement_serves_the_version_in_force(finished: dict[str, Any]) -> None:
    events = finished["events"]
    (kill,) = (number for number, event in enumerate(events) if event["what"].startswith("killed"))
    dead, after = events[kill]["engine"], events[kill + 1 :]
    (new,) = {event["engine"] for event in after if event["what"] == "process started"}
    own = {event["what"]: event for event in after if event["engine"] == new and "committed" not in event["what"]}
    assert list(own) == [
        "process started", "at the current version", "registered with the router", "first sample answered",
    ]  # fmt: skip
    registered = own["registered with the router"]
    committed = [event for event in events if event["what"] == "new weights committed"]
    in_force = max((event["version"] for event in committed if event["seconds"] <= registered["seconds"]), default=0)
    assert own["at the current version"]["version"] == registered["version"] == in_force
    assert own["first sample answered"]["version"] >= in_force
    assert any(event["version"] > in_force and new in event["engine"] for event in committed), "it is in the group"
    assert not any(
        dead in event["engine"] for event in committed if event["seconds"] > own["process started"]["seconds"]
    )


def test_no_sample_is_lost_or_mixed(finished: dict[str, Any]) -> None:
    assert finished["asked"] == finished["answered"] > 100
    assert finished["sent_again"] > 0
    checks = finished["checks"]
    for name in ("lost, or answered twice", "mixed: other bits than their version gives", "wrong with the replacement"):
        assert checks[name] == {"value": "0", "ok": True}
    scored, spans = map(int, checks["spans scored again"]["value"].split(" of "))
    assert scored == spans >= finished["answered"]
    assert int(checks["samples that span versions"]["value"]) > 0


def test_interrupted_it_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C comes just after the kill and reaches all processes of the group, as in a terminal."""
    mark = uuid.uuid4().hex
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command("--seconds", "12", "--release-every", "2", "--events", str(tmp_path / "events.json")),
            cwd=ROOT,
            env=os.environ | {MARK: mark},
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        deadline = time.monotonic() + RUN_S / 2
        while "killed" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        # Some write their title over their environment: the mark finds what starts later, the tree what is there now.
        processes = descendants(process.pid)
        assert len(processes) > 8, "Ray's, the router, actors and engines"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(END_S) == 130
        assert log.read_text().endswith("interrupted; every process has been stopped\n")
        deadline = time.monotonic() + 10
        while left := [pid for pid in processes if alive(pid)] + marked(mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        assert not (tmp_path / "events.json").exists()
    finally:
        process.kill()


def descendants(pid: int) -> list[int]:
    """Return the ids of the children of a process, of their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        new = children.get(left.pop(), [])
        found += new
        left += new
    return found


def marked(mark: str) -> list[int]:
    """Return the ids of the processes that have the mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found

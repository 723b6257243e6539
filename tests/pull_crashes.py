"""Kills a real process that pulls, at each call that touches a file, and checks the files that it left.

    python -m tests.pull_crashes ROOT SCENARIO      one JSON line for each point of death, then {"done": points}

Forks its victims itself, before any thread exists: what is killed is a whole process, by SIGKILL, from a profile hook
just before or just after a call into the system.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.delta_models import same_bits
from tests.published_versions import Stream, read_checkpoint
from weight_sync.delta.local_checkpoint import _recover, pull
from weight_sync.delta.local_state import read_state, require_settled
from weight_sync.errors import TransactionStateError

CALLS = {"open", "write", "fsync", "replace", "rename", "mkdir", "rmdir", "unlink", "remove", "flock", "scandir"}
TIMEOUT_S = 5.0


def run(root: Path, scenario: str) -> int:
    """Play every point of death of one scenario, and return the number of points."""
    stream, before, target = prepare(root, scenario)
    source_aside = root / "source_aside"
    point = 0
    while True:
        local = root / f"local_{point}"
        if stream.local.exists():
            shutil.copytree(stream.local, local)
        finished = not _killed(lambda local=local: _pull(stream, local, target), point)
        report: dict[str, Any] = {"point": point, "finished": finished}
        report["between"] = _looks_between(local)
        held = read_checkpoint(local)
        if not report["between"]:
            report["holds"] = _which(stream, held, (before, target))
        elif report["between"]:
            stream.source.rename(source_aside)  # what was promised needs the source no more
            _recover(local)
            source_aside.rename(stream.source)
            report["recovered"] = _which(stream, read_checkpoint(local), (before, target))
        _killed(lambda local=local: _pull(stream, local, target), (point * 7) % 40)  # and the repair is killed as well
        _pull(stream, local, target)
        report["after"] = _which(stream, read_checkpoint(local), (target,))
        report["files"] = sorted(item.name for item in local.iterdir() if item.is_file())
        report["expected_files"] = list(read_state(local).applied.files)  # type: ignore[union-attr]
        print(json.dumps(report), flush=True)
        if finished:
            return point
        shutil.rmtree(local)
        point += 1


def prepare(root: Path, scenario: str) -> tuple[Stream, int | None, int]:
    """Return the stream, the version of the local checkpoint (None: there is none), and the version to pull."""
    stream = Stream(root)
    stream.publish("xor")
    if scenario == "first":
        return stream, None, 1
    _pull(stream, stream.local, 1)
    if scenario == "deltas":
        stream.publish("overwrite")
        stream.publish("ulp-gap")
        return stream, 1, 3
    assert scenario == "full", scenario
    stream.publish("full")
    return stream, 1, 2


def _pull(stream: Stream, local: Path, target: int) -> None:
    pull(local, stream.base, stream.source, target, timeout_s=TIMEOUT_S)


def _killed(action: Callable[[], None], point: int) -> bool:
    """Run `action` in a process that dies at its `point`-th touch of a file; whether it died."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            if event in ("c_call", "c_return") and getattr(argument, "__name__", "") in CALLS:
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        status = 1
        try:
            sys.setprofile(hook)
            action()
            status = 0
        finally:
            sys.setprofile(None)
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the pull failed"
    return False


def _looks_between(local: Path) -> bool:
    if not local.exists():
        return False
    try:
        require_settled(local)
    except TransactionStateError:
        return True
    return False


def _which(stream: Stream, held: dict[str, torch.Tensor], versions: tuple[int | None, ...]) -> str:
    """Return which version the tensors are: its number, "nothing", or "a mixture"."""
    for version in versions:
        if version is None and not held:
            return "nothing"
        if version is not None and same_bits(held, stream.versions[version]):
            return str(version)
    return "a mixture"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"done": run(Path(sys.argv[1]), sys.argv[2])}))

"""A pull that is killed at any point leaves the old version or the new one, and the next pull succeeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("scenario", "old", "new"), [("first", "nothing", "1"), ("deltas", "1", "3"), ("full", "1", "2")]
)
def test_a_killed_pull_leaves_one_whole_version(tmp_path: Path, scenario: str, old: str, new: str) -> None:
    command = [sys.executable, "-m", "tests.pull_crashes", str(tmp_path), scenario]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stderr
    *reports, last = [json.loads(line) for line in run.stdout.splitlines()]
    assert last["done"] == len(reports) - 1 > 20
    for report in reports:
        assert report["after"] == new, report
        assert report["files"] == report["expected_files"], report
        if report["between"]:
            assert report["recovered"] == new, report
        else:
            assert report["holds"] in (old, new), report
    # Deaths were spread over all of it: before the decision, in between, and after it was done.
    assert any(report["between"] for report in reports)
    assert {report["holds"] for report in reports if not report["between"]} == {old, new}

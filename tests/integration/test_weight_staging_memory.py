"""Peak resident memory of a refresh in each staging mode, against the formulas of docs/reference/weights/staging.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mode", ["host", "device", "journal", "in_place"])
def test_peak_memory_is_the_formula_s(mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.weight_memory_process", mode, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    formula = measured["bucket"]
    if mode in ("host", "device"):
        formula += measured["weights"]
    assert 0.9 * formula < measured["peak"] < 1.1 * formula, (measured, formula)

"""Tests of batch invariance, operators and tables of buckets, compiled for each instruction set of this processor.

Operators are loaded once in a process, so each set has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.kernels.isa import COMPILER_FLAGS, refusal_of

TESTS = Path(__file__).parents[2]
FILES = (
    *(TESTS / f"unit/engine/test_invariance_{name}.py" for name in ("engine", "layers")),
    TESTS / "unit/scheduler/test_invariance.py",
    *(TESTS / f"unit/kernels/test_{name}.py" for name in ("biased", "latent", "numerics", "ops")),
    *(TESTS / f"unit/weight_sync/test_{name}.py" for name in ("span_tables", "spans")),
)
TIMEOUT_S = 1500.0  # two minutes to compile and one to run, on a busy machine


@pytest.mark.full
@pytest.mark.parametrize("isa", COMPILER_FLAGS)
def test_batch_invariance_holds_on(isa: str) -> None:
    if refusal_of(isa):
        pytest.skip(refusal_of(isa))
    done = _pytest(isa, *FILES)
    assert done.returncode == 0, done.stdout[-4000:]


def test_every_file_of_them_is_there() -> None:
    assert [path for path in FILES if not path.is_file()] == []


@pytest.mark.mutant
def test_another_set_than_was_asked_for_is_noticed() -> None:
    """An instruction set that is missing here does not pass for one that is there."""
    done = _pytest("none", FILES[-1])
    assert done.returncode != 0 and "no instruction set 'none'" in done.stdout


def _pytest(isa: str, *files: Path) -> subprocess.CompletedProcess[str]:
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "--tier", "gate")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        cwd=TESTS.parent,
        env=os.environ | {"LOCKSTEP_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

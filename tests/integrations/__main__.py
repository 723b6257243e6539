"""`python -m tests.integrations [name ...]`: every framework in a process of its own, and docs/integrations.md.

The table is written when all of them ran.  Exit status 1 if a step failed or a process did not end in time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.integrations.framework import Row, load_rows
from tests.integrations.page import write_table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Frameworks that are not on PyPI are replayed from recordings, by tests that `make test-full` runs too.
RECORDED = ROOT / "tests" / "integration" / "test_recorded_clients.py"
FILE_S = 600.0  # the slowest takes 100 s on two idle cores
PLUGIN = "tests.integrations.rows"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integrations")
    parser.add_argument("names", nargs="*", help="words of file names; default: all")
    names = parser.parse_args().names
    files = [file for file in [*sorted(HERE.glob("test_*.py")), RECORDED] if not names or _named(file, names)]
    rows, failures = [], []
    for file in files:
        started = time.monotonic()
        found, status = _run(file)
        passed, failed = sum(len(row.passed) for row in found), sum(len(row.failed) for row in found)
        print(f"{file.stem}: {passed} of {passed + failed} steps, {time.monotonic() - started:.0f} s", flush=True)
        rows += found
        failures += [file.stem] if status else []
    if not names:
        write_table(ROOT / "docs" / "integrations.md", rows)
    if failures:
        print(f"FAILED: {', '.join(failures)}")
    return 1 if failures else 0


def _named(file: Path, names: list[str]) -> bool:
    return any(name in file.stem for name in names)


def _run(file: Path) -> tuple[list[Row], int]:
    """Run a test file; return its rows, if it came so far, and its exit status."""
    with tempfile.TemporaryDirectory(prefix="lockstep-row-") as folder:
        path = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.integrations.rows",
            "--rows",
            str(path),
            str(file),
        ]
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=FILE_S).returncode
        except subprocess.TimeoutExpired:
            print(f"{file.stem}: not done within {FILE_S:.0f} s", flush=True)
            status = 1
        return (load_rows(path) if path.exists() else []), status


if __name__ == "__main__":
    sys.exit(main())

"""Operators compiled with the address and undefined-behaviour sanitizers, and processes that load them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rollout.kernels.build import build_kernels, find_compiler
from tests.check_programs import usual_flags

ROOT = Path(__file__).resolve().parents[1]
# Added to the usual flags: the last -O counts.  Checked containers too, and nothing goes on after a report.
FLAGS = (
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-D_GLIBCXX_ASSERTIONS",
)
COMPILE_TIMEOUT_S = 600.0
SIGNS = ("ERROR: AddressSanitizer", "runtime error:", "AddressSanitizer:DEADLYSIGNAL", "Assertion '")


def sanitized(sources: Path) -> Path:
    """Return the library of `sources` with sanitizers for the usual instruction set, from the cache or compiled now."""
    return build_kernels(sources=sources, timeout_s=COMPILE_TIMEOUT_S, extra_flags=(*usual_flags(), *FLAGS))


def run_sanitized(arguments: list[str], timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the repository, with the sanitizers' runtimes loaded first."""
    # The C++ library too: the address sanitizer looks for what throws exceptions when the process starts.
    runtimes = [_runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        # Python and torch leave memory to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, *arguments]
    return subprocess.run(
        words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def report_of(process: subprocess.CompletedProcess[str]) -> str:
    """Return the lines from the first sign of a report on, or an empty text if there is none."""
    lines = process.stderr.splitlines()
    signs = [i for i, line in enumerate(lines) if any(sign in line for sign in SIGNS)]
    return "\n".join(lines[signs[0] :][:40]) if signs else ""


def _runtime(name: str) -> str:
    words = [*find_compiler(), f"-print-file-name={name}"]
    path = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert Path(path).is_file(), f"{words[0]} has no {name}"
    return path

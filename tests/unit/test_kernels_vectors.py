"""The vectors that the operators are written with, compiled for this processor and for lesser ones.

Also with a mistake put in, so that the checks of `kernels_vectors.cpp` are known to bite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_programs import TARGETS, headers_with, run_check

PROGRAM = Path(__file__).with_name("kernels_vectors.cpp")
FLAGS = ("-DNDEBUG",)


@pytest.mark.full(but="native")
@pytest.mark.parametrize("target", list(TARGETS))
def test_vectors_compute_what_they_say(target: str) -> None:
    done = run_check(PROGRAM, TARGETS[target], flags=FLAGS)
    assert done.returncode == 0, done.stdout
    if target != "native":
        assert done.stdout.startswith(f"{target}: ")


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        ("packed.h", "begin(tile + 1) - begin(tile)", "begin(tile + 1) - begin(tile) - (tile > 0)"),
        (
            "simd.h",
            "_mm512_set1_epi32(static_cast<int>(0xffff0000))",
            "_mm512_set1_epi32(static_cast<int>(0xfffe0000))",
        ),
        ("simd.h", "1.0f / 24", "1.0f / 25"),
    ],
)
def test_a_mistake_is_noticed(tmp_path: Path, header: str, right: str, wrong: str) -> None:
    headers = headers_with((header, right, wrong), tmp_path)
    assert run_check(PROGRAM, headers=headers, flags=FLAGS).returncode != 0

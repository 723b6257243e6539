"""The sampler's arithmetic, compiled for this processor and for lesser ones.

Mistakes are also put in, so that the checks of `check_sampler.cpp` are known to notice them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_programs import TARGETS, headers_with, run_check

PROGRAM = Path(__file__).with_name("check_sampler.cpp")
FLAGS = ("-O1", "-D_GLIBCXX_ASSERTIONS", "-DNDEBUG")


@pytest.mark.full(but="native")
@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_sampled_as_defined(target: str) -> None:
    done = run_check(PROGRAM, target, flags=FLAGS)
    assert done.returncode == 0, done.stdout
    if target != "native":
        assert done.stdout.startswith(f"{target}: ")


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("header", "right", "wrong", "complaint"),
    [
        # One too few of the tied tokens is kept.
        ("sampler_filter.h", "i = last.id + 1 - id", "i = last.id - id", "mask holds less"),
        # Tokens without weight are in the mask; the last lane of a vector never is.
        ("sampler_filter.h", "if (lanes[i] == 0.0f) continue;", "", "mask holds more"),
        ("sampler_filter.h", "first + i < row.size(); ++i", "first + i + 1 < row.size(); ++i", "mask holds less"),
        # The requested mass is a share of the whole row, not of the tokens that top-k left.
        ("sampler_filter.h", "whole = sums_.total();", "", "draw"),
        # The search begins above the end.
        ("sampler_filter.h", "std::log(share) - kMargin", "std::log(share) + 3.0", "mask holds less"),
        ("sampler_row.h", "before + sums_[block] <= target", "before + sums_[block] < 0.9 * target", "plain draw"),
        ("sampler_edits.h", "repetition != 1.0f && uses_[id] == 0", "repetition != 1.0f", "edit"),
    ],
)
def test_a_mistake_is_noticed(tmp_path: Path, header: str, right: str, wrong: str, complaint: str) -> None:
    headers = headers_with((header, right, wrong), tmp_path)
    done = run_check(PROGRAM, headers=headers, flags=FLAGS)
    assert done.returncode == 1 and f"{complaint} (" in done.stdout, done.stdout

"""The sampler's arithmetic, compiled for this processor and for lesser ones.

Also with a mistake put in, so that the checks of `kernels_sampler.cpp` are known to bite.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from rollout.kernels.build import FLAGS, SOURCES, find_compiler

PROGRAM = Path(__file__).with_name("kernels_sampler.cpp")
X86 = platform.machine() == "x86_64"
TARGETS = {"native": "native", **({"avx2": "x86-64-v3", "portable": "x86-64"} if X86 else {})}


def _run(tmp_path: Path, march: str, headers: Path) -> subprocess.CompletedProcess[str]:
    binary, include = tmp_path / "check", Path(torch.__file__).parent / "include"
    flags = [
        *(flag for flag in FLAGS if not flag.startswith("-march")),
        f"-march={march}",
        "-O1",
        "-D_GLIBCXX_ASSERTIONS",
    ]
    words = [*find_compiler(), *flags, "-DNDEBUG", f"-I{headers}", f"-I{include}", str(PROGRAM), "-o", str(binary)]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    return subprocess.run([str(binary)], check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.full(but="native")
@pytest.mark.parametrize("target", list(TARGETS))
def test_rows_are_sampled_as_defined(tmp_path: Path, target: str) -> None:
    done = _run(tmp_path, TARGETS[target], SOURCES)
    assert done.returncode == 0, done.stdout
    if target != "native":
        assert done.stdout.startswith(f"{target}: ")


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("header", "right", "wrong", "complaint"),
    [
        # Of tokens that tie, one too few is kept.
        ("sampler_filter.h", "i = last.id + 1 - id", "i = last.id - id", "draw"),
        # The mass that is asked for is that of the row, not of what top-k left.
        ("sampler_filter.h", "whole = sums_.total();", "", "draw"),
        # The search begins above the end.
        ("sampler_filter.h", "std::log(share) - kMargin", "std::log(share) + 3.0", "draw"),
        ("sampler_row.h", "before + sums_[block] <= target", "before + sums_[block] < 0.9 * target", "plain draw"),
        ("sampler_edits.h", "repetition != 1.0f && uses_[id] == 0", "repetition != 1.0f", "edit"),
    ],
)
def test_a_mistake_is_noticed(tmp_path: Path, header: str, right: str, wrong: str, complaint: str) -> None:
    for path in SOURCES.glob("*.h"):
        text = path.read_text()
        assert path.name != header or text.count(right) == 1
        (tmp_path / path.name).write_text(text.replace(right, wrong) if path.name == header else text)
    done = _run(tmp_path, "native", tmp_path)
    assert done.returncode == 1 and f"{complaint} (" in done.stdout, done.stdout

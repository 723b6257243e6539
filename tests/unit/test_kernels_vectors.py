"""The vectors that the operators are written with, compiled for this processor and for lesser ones.

Also with a mistake put in, so that the checks of `kernels_vectors.cpp` are known to bite.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from rollout.kernels.build import FLAGS, SOURCES, find_compiler

PROGRAM = Path(__file__).with_name("kernels_vectors.cpp")
X86 = platform.machine() == "x86_64"
TARGETS = {"native": "native", **({"avx2": "x86-64-v3", "portable": "x86-64"} if X86 else {})}


def _run(tmp_path: Path, march: str, headers: Path) -> subprocess.CompletedProcess[str]:
    binary, include = tmp_path / "check", Path(torch.__file__).parent / "include"
    flags = [flag for flag in FLAGS if not flag.startswith("-march")]
    words = [*find_compiler(), *flags, f"-march={march}", "-DNDEBUG", f"-I{headers}", f"-I{include}"]
    subprocess.run([*words, str(PROGRAM), "-o", str(binary)], check=True, capture_output=True, timeout=120)
    return subprocess.run([str(binary)], check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.full(but="native")
@pytest.mark.parametrize("target", list(TARGETS))
def test_vectors_compute_what_they_say(tmp_path: Path, target: str) -> None:
    done = _run(tmp_path, TARGETS[target], SOURCES)
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
    for path in (*SOURCES.glob("*.h"), SOURCES / "packed.cpp"):
        text = path.read_text()
        assert path.name != header or right in text
        (tmp_path / path.name).write_text(text.replace(right, wrong) if path.name == header else text)
    assert _run(tmp_path, "native", tmp_path).returncode != 0

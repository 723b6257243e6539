"""The attention operator's arithmetic, compiled for this processor and for lesser ones.

Also with a mistake put in, so that the checks of `kernels_attention.cpp` are known to bite.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from rollout.kernels.build import FLAGS, SOURCES, find_compiler

PROGRAM = Path(__file__).with_name("kernels_attention.cpp")
X86 = platform.machine() == "x86_64"
TARGETS = {"native": "native"} | ({"avx2": "x86-64-v3", "portable": "x86-64"} if X86 else {})


def _run(tmp_path: Path, march: str, headers: Path) -> subprocess.CompletedProcess[str]:
    binary, torch_root = tmp_path / "check", Path(torch.__file__).parent
    flags = [flag for flag in FLAGS if not flag.startswith("-march")]
    words = [*find_compiler(), *flags, f"-march={march}", f"-I{headers}", f"-I{torch_root / 'include'}", str(PROGRAM)]
    libraries = [f"-L{torch_root / 'lib'}", f"-Wl,-rpath,{torch_root / 'lib'}", "-lc10"]
    subprocess.run([*words, *libraries, "-o", str(binary)], check=True, capture_output=True, timeout=120)
    return subprocess.run([str(binary)], check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.full(but="native")
@pytest.mark.parametrize("target", list(TARGETS))
def test_attention_is_right_and_the_same_in_any_chunk(tmp_path: Path, target: str) -> None:
    done = _run(tmp_path, TARGETS[target], SOURCES)
    assert done.returncode == 0, done.stdout
    if target != "native":
        assert done.stdout.startswith(f"{target}: ")


STEP = "sums[r][n] = U::step(sums[r][n], units[n], rows[r * row_stride]);"
FUSED = "sums[r][n] = units[n] * splat(rows[r * row_stride]) + sums[r][n];"
# What is complained of: file, what stands there, what is put in its place.
MISTAKES = {
    # A row that is alone is summed another way: as exact, but not the same.
    "other bits": (
        "attention_block.h",
        STEP,
        f"if constexpr (R == 1 && U::kPerUnit == 1) {{ {FUSED} }} else {{ {STEP} }}",
    ),
    # The mask one key too wide.
    "far from": ("attention_tile.h", "row / tile_.group + 1 - begin", "row / tile_.group + 2 - begin"),
    # Rows that are the first to see a block read the queries of the first rows.
    "both sides of an edge": ("attention_tile.h", "query_stride_ + row :", "query_stride_ :"),
}


@pytest.mark.mutant
@pytest.mark.parametrize("complaint", list(MISTAKES))
def test_a_mistake_is_noticed(tmp_path: Path, complaint: str) -> None:
    file, right, wrong = MISTAKES[complaint]
    for path in SOURCES.glob("*.h"):
        text = path.read_text()
        assert path.name != file or text.count(right) == 1
        (tmp_path / path.name).write_text(text.replace(right, wrong) if path.name == file else text)
    done = _run(tmp_path, "native", tmp_path)
    assert done.returncode != 0 and complaint in done.stdout

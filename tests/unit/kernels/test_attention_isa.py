"""The attention operator's arithmetic, compiled for this processor and for lesser ones.

Mistakes are also put in, so that the checks of `check_attention.cpp` are known to notice them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_programs import TARGETS, headers_with, run_check

PROGRAM = Path(__file__).with_name("check_attention.cpp")


@pytest.mark.full(but=("native", "emulated_amx"))
@pytest.mark.parametrize("target", TARGETS)
def test_attention_is_right_and_the_same_in_any_chunk(target: str) -> None:
    done = run_check(PROGRAM, target)
    assert done.returncode == 0, done.stdout
    if target != "native":
        assert done.stdout.startswith(f"{target}: ")


STEP = "sums[r][n] = U::step(sums[r][n], units[n], rows[r * row_stride]);"
FUSED = "sums[r][n] = units[n] * splat(rows[r * row_stride]) + sums[r][n];"
# By the complaint: the file, the right text in it, and the mistake that replaces it.
MISTAKES = {
    # A row that is alone is summed another way: as exact, but not the same.
    "other bits": (
        "attention_block.h",
        STEP,
        f"if constexpr (R == 1 && U::kPerUnit == 1) {{ {FUSED} }} else {{ {STEP} }}",
    ),
    # The mask is one key too wide.
    "far from": ("attention_tile.h", "row / tile_.group + 1 - begin", "row / tile_.group + 2 - begin"),
    # The window is one key too wide; then it is one key too narrow in the blocks that are read.
    "window": ("attention_tile.h", "seen - tile_.window, 0", "seen - tile_.window - 1, 0"),
    "other bits in a chunk: float32, window": (
        "attention_tile.h",
        "first_position + 1 - window",
        "first_position + 2 - window",
    ),
    # The sink is scaled like a score.  Adding it again with each segment would show the same way.
    "sinks": ("attention_tile.h", "sink * kLog2E -", "sink * scale_ -"),
    # Values have the size of keys.
    "wide values": ("attention_block.h", "return round_up(value, kLanes)", "return round_up(key, kLanes)"),
    # Rows that are the first to see a block read the queries of the first rows.
    "both sides of an edge": ("attention_tile.h", "query_stride_ + row :", "query_stride_ :"),
}


# The same for matrix tiles.
MISTAKES_WITH_TILES = {
    # A row that is alone takes the units last to first: as exact, but not the same.
    "other bits": (
        "attention_matrix.h",
        "for (int step = 0; step < steps; ++step) {",
        "for (int k = 0; k < steps; ++k) { const int step = rows == 1 ? steps - 1 - k : k;",
    ),
    # Every second step of sixteen keys is left out; then the second of two lanes is of another column.
    "far from": ("attention_block.h", "round_up(count, kStepKeys<Scalar>) /", "count /"),
    "latent": ("attention_matrix.h", "units + n * kLanes, b_stride", "units + (n % 3) * kLanes, b_stride"),
    # Elements beyond the last key, which a step multiplies by zero, may hold anything.
    "exact result": ("attention_block.h", "2 * kLanes : kTileKeys", "kTileKeys : kTileKeys"),
    # Numerators are not made smaller when a larger score comes.
    "window": ("attention_panel.h", "load(from + i) * factor", "load(from + i)"),
}


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("target", "complaint", "mistake"),
    [
        *(("native", *mistake) for mistake in MISTAKES.items()),
        *(("emulated_amx", *mistake) for mistake in MISTAKES_WITH_TILES.items()),
    ],
)
def test_a_mistake_is_noticed(tmp_path: Path, target: str, complaint: str, mistake: tuple[str, str, str]) -> None:
    done = run_check(PROGRAM, target, headers=headers_with(mistake, tmp_path))
    assert done.returncode != 0 and complaint in done.stdout

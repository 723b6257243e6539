"""The vectors that the operators are written with, compiled for this processor and for lesser ones.

Mistakes are also put in, so that the checks of `check_vectors.cpp` are known to notice them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.check_programs import TARGETS, headers_with, run_check

PROGRAM = Path(__file__).with_name("check_vectors.cpp")
FLAGS = ("-DNDEBUG",)


@pytest.mark.full(but=("native", "emulated_amx"))
@pytest.mark.parametrize("target", TARGETS)
def test_vectors_compute_what_they_say(target: str) -> None:
    done = run_check(PROGRAM, target, flags=FLAGS)
    assert done.returncode == 0, done.stdout
    if target != "native":
        assert done.stdout.startswith(f"{target}: ")


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        # Denormal results are kept; the edge of flushing is wrong; odd elements follow even ones in one sum.
        ("tiles.h", "sums[n] = flushed(next[n])", "sums[n] = next[n]"),
        ("tiles.h", "0x1p-25", "0x1p-24"),
        (
            "tiles.h",
            "add_products(odd_of(tiles_[kA][m][k]), odd_b[k], odd)",
            "add_products(odd_of(tiles_[kA][m][k]), odd_b[k], even)",
        ),
        # A row of tokens beyond sixteen meets the first ones; the weights' second half is the first.
        ("packed.cpp", "tokens + kTileRows * kTileRows, kTokenStride", "tokens, kTokenStride"),
        ("packed.cpp", "panel + kLanes * kGroup<bf16>, kPanelStride", "panel, kPanelStride"),
        # A token that is alone is summed in two parts: as exact, but not the same.
        (
            "packed.cpp",
            "multiply_matrix_tiles<PanelTiles>(tiles[i].rows, packed + row * groups, source, groups, sums + row);",
            "multiply_matrix_tiles<PanelTiles>(tiles[i].rows, packed + row * groups, source, groups, sums + row);"
            " if constexpr (requires { Source{source.panel + 1}; }) if (tiles[i].rows == 1 && groups > kTileRows) {"
            " Source rest{source.panel + kTileRows * kPanelRows * kGroup<bf16>};"
            " F32x16 first[2 * kTileRows][kPanelVectors];"
            " const uint32_t* tokens = packed + row * groups;"
            " multiply_matrix_tiles<PanelTiles>(1, tokens, source, kTileRows, first);"
            " multiply_matrix_tiles<PanelTiles>(1, tokens + kTileRows, rest, groups - kTileRows, sums + row);"
            " for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = first[0][v] + sums[row][v]; }",
        ),
        # Steps are not whole: elements behind the last group of a token are multiplied, too.
        (
            "packed.h",
            "T elements[kElements] = {};",
            "T elements[kElements]; std::memset(elements, 0xff, sizeof elements);",
        ),
    ],
)
def test_a_mistake_with_tiles_is_noticed(tmp_path: Path, header: str, right: str, wrong: str) -> None:
    headers = headers_with((header, right, wrong), tmp_path)
    assert run_check(PROGRAM, "emulated_amx", headers=headers, flags=FLAGS).returncode != 0


def on(target: str, header: str, right: str, wrong: str) -> Any:
    marks = pytest.mark.skipif(target not in TARGETS, reason=f"this processor has no {target}")
    return pytest.param(target, header, right, wrong, marks=marks)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("target", "header", "right", "wrong"),
    [
        # Of a negative number of FP8 the sign is left in the exponent; a half of a byte has no sign.
        on(
            "avx2",
            "packed_held.h",
            "_mm_set1_epi16(static_cast<int16_t>(0xbfff))",
            "_mm_set1_epi16(static_cast<int16_t>(0xffff))",
        ),
        on("portable", "packed_held.h", "static_cast<int8_t>(*p << 4) >> 4", "*p & 15"),
        on("native", "packed.h", "first(i + 1) - first(i)", "first(i + 1) - first(i) - (i > 0)"),
        on("native", "simd.h", "1.0f / 24", "1.0f / 25"),
        on(
            "avx512",
            "simd.h",
            "_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000)))",
            "_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xfffe0000)))",
        ),
        # Elements of a token change places, or with neighbours'; odd weights are lost; rows of a tile change places.
        on("avx512", "packed.cpp", "number(tokens + i * M + t)", "number(tokens + (kGroup<T> - 1 - i) * M + t)"),
        on("avx512", "packed.cpp", "number(tokens + i * M + t)", "number(tokens + i * M + (t + i) % M)"),
        on("avx512", "packed.cpp", "v * kLanes, values.odd)", "v * kLanes, values.even)"),
        on("avx512", "packed.h", "square[i], rows)", "square[i ^ 1], rows)"),
        on("avx2", "packed.cpp", "tokens + kElement * M + t", "tokens + (kGroup<T> - 1 - kElement) * M + t"),
        on("avx2", "packed.h", "place[i * rows + row]", "place[i * rows + rows - 1 - row]"),
        # A token that is alone takes odd elements first: as exact, but not the same.
        on(
            "avx512",
            "packed.cpp",
            "for (int i = 0; i < kGroup<T>; ++i) {\n#pragma GCC unroll 12",
            "for (int n = 0; n < kGroup<T>; ++n) { const int i = M == 1 ? kGroup<T> - 1 - n : n;\n#pragma GCC unroll 2",
        ),
        *(
            on("avx2", "simd.h", right, wrong)
            for right, wrong in (
                (
                    "const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));",
                    "const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xfffe0000));",
                ),
                # Ties go away from zero; NaN becomes infinity; numbers with the sign bit are cut to the largest int16.
                ("_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))", "_mm256_set1_epi32(0x8000)"),
                ("_mm256_set1_epi32(0x7fc0), nan)", "_mm256_set1_epi32(0x7f80), nan)"),
                ("_mm_packus_epi32(_mm256_castsi256_si128(bits)", "_mm_packs_epi32(_mm256_castsi256_si128(bits)"),
                # The sum is as exact, but in another order.
                (
                    "_mm256_add_ps(quarter_sums(x, 0), quarter_sums(x, 1))",
                    "_mm256_hadd_ps(quarter_sums(x, 0), quarter_sums(x, 1))",
                ),
                ("_mm256_cvtepu8_epi32(eight_bytes(p))", "_mm256_cvtepi8_epi32(eight_bytes(p))"),
                # The other half is loaded, too; two of the last four lanes are not compared.
                ("i == 0 ? part_load(p) : part_splat(0.0f)", "part_load(p)"),
                ("_mm_max_ss(two, _mm_shuffle_ps(two, two, 1))", "two"),
            )
        ),
    ],
)
def test_a_mistake_is_noticed(tmp_path: Path, target: str, header: str, right: str, wrong: str) -> None:
    headers = headers_with((header, right, wrong), tmp_path)
    assert run_check(PROGRAM, target, headers=headers, flags=FLAGS).returncode != 0

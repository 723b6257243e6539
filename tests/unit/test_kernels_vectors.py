"""The vectors that the operators are written with, compiled for this processor and for lesser ones.

Also with a mistake put in, so that the checks of `kernels_vectors.cpp` are known to bite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.kernels.isa import refusal_of
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


EMULATED = "-DLOCKSTEP_EMULATED_TILES"


def test_emulated_tiles_compute_what_they_say() -> None:
    done = run_check(PROGRAM, flags=(*FLAGS, EMULATED))
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("emulated_amx: ")


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        # Denormal results are kept; the edge of what is flushed; odd elements follow even ones in one sum.
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
        # A token that is alone is multiplied by vectors: as exact, but not the same.
        (
            "packed.cpp",
            "if constexpr (kTiled<typename Source::Element>) {",
            "if constexpr (kTiled<typename Source::Element>) {"
            " if (rows == 1) return choose_tile(rows, tokens, source, groups, sums);",
        ),
        # No whole steps: what lies behind the last group of a token is multiplied, too.
        ("packed.h", "uint32_t last[kStep] = {};", "uint32_t last[kStep]; std::memset(last, 0xff, sizeof last);"),
    ],
)
def test_a_mistake_with_tiles_is_noticed(tmp_path: Path, header: str, right: str, wrong: str) -> None:
    headers = headers_with((header, right, wrong), tmp_path)
    assert run_check(PROGRAM, headers=headers, flags=(*FLAGS, EMULATED)).returncode != 0


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("target", "header", "right", "wrong"),
    [
        ("native", "packed.h", "begin(tile + 1) - begin(tile)", "begin(tile + 1) - begin(tile) - (tile > 0)"),
        pytest.param(
            "native",
            "simd.h",
            "_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000)))",
            "_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xfffe0000)))",
            marks=pytest.mark.skipif(bool(refusal_of("avx512")), reason="AVX-512 is not compiled for this processor"),
        ),
        *(
            pytest.param(
                "avx2",
                "simd.h",
                right,
                wrong,
                marks=pytest.mark.skipif("avx2" not in TARGETS, reason="AVX2 is of x86 processors"),
            )
            for right, wrong in (
                (
                    "const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));",
                    "const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xfffe0000));",
                ),
                # Ties go away from zero; NaN becomes infinity; what has the sign bit set is cut to the largest int16.
                ("_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))", "_mm256_set1_epi32(0x8000)"),
                ("_mm256_set1_epi32(0x7fc0), nan)", "_mm256_set1_epi32(0x7f80), nan)"),
                ("_mm_packus_epi32(_mm256_castsi256_si128(bits)", "_mm_packs_epi32(_mm256_castsi256_si128(bits)"),
                # As exact a sum, in another order.
                (
                    "_mm256_add_ps(quarter_sums(x, 0), quarter_sums(x, 1))",
                    "_mm256_hadd_ps(quarter_sums(x, 0), quarter_sums(x, 1))",
                ),
                ("_mm256_cvtepu8_epi32(eight_bytes(p))", "_mm256_cvtepi8_epi32(eight_bytes(p))"),
            )
        ),
        ("native", "simd.h", "1.0f / 24", "1.0f / 25"),
    ],
)
def test_a_mistake_is_noticed(tmp_path: Path, target: str, header: str, right: str, wrong: str) -> None:
    headers = headers_with((header, right, wrong), tmp_path)
    assert run_check(PROGRAM, TARGETS[target], headers=headers, flags=FLAGS).returncode != 0

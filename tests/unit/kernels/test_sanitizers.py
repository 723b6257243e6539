"""The operators under the address and undefined-behaviour sanitizers: no report, and the results of the usual build.

Compiling them takes a minute or two on two cores, once for each change of the sources.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from rollout.kernels import build
from rollout.kernels.build import SOURCES, cache_key, find_compiler
from tests import odd_sizes
from tests.kernels import native_ops
from tests.sanitizers import FLAGS, report_of, run_sanitized, sanitized

pytestmark = pytest.mark.full


def test_no_report_and_the_same_bits_over_odd_sizes() -> None:
    done = run_sanitized(["-m", "tests.odd_sizes", str(sanitized(SOURCES))])
    assert done.returncode == 0 and not report_of(done), report_of(done) or done.stderr
    native_ops()
    before = torch.get_num_threads()
    try:
        assert done.stdout.strip() == odd_sizes.digest()
    finally:
        torch.set_num_threads(before)


def test_another_build_does_not_replace_the_usual_one() -> None:
    assert cache_key(SOURCES, FLAGS) != cache_key(SOURCES)


BROKEN = """
#include <cstdint>
#include <vector>
#include "simd.h"
extern "C" {
float past_the_end(const float* x, int64_t n) { float s = 0; for (int64_t i = 0; i <= n; ++i) s += x[i]; return s; }
void masked_load(const float* x, int64_t n) { const volatile float y = lockstep::sum(lockstep::load(x, n + 1)); }
void masked_store(float* x, int64_t n) { lockstep::store(x, lockstep::splat(1), n + 1); }
void before_the_start(float* x, int64_t) { x[-1] = 1; }
float freed(const float*, int64_t n) { float* y = new float[n](); delete[] y; return y[n - 1]; }
int64_t overflow(const float*, int64_t n) { return INT64_MAX - 2 + n; }
int32_t shift(const float*, int64_t n) { return 1 << (32 + n); }
int32_t cast(const float*, int64_t n) { return static_cast<int32_t>(1e20f * n); }
float element(const float*, int64_t n) { std::vector<float> y(n); return y[n]; }
float right(const float* x, int64_t n) { float s = 0; for (int64_t i = 0; i < n; ++i) s += x[i]; return s; }
}
"""
DEFECTS = {
    "past_the_end": "heap-buffer-overflow",
    "masked_load": "heap-buffer-overflow",
    "masked_store": "heap-buffer-overflow",
    "before_the_start": "heap-buffer-overflow",
    "freed": "heap-use-after-free",
    "overflow": "signed integer overflow",
    "shift": "shift exponent",
    "cast": "outside the range of representable values",
    "element": "Assertion '",
}
CALL = """
import ctypes, sys
if sys.argv[3] == "tensor":
    import torch
    x = torch.ones(13)
    address = x.data_ptr()
else:
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    address = malloc(ctypes.c_size_t(13 * 4))
function = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])
function(ctypes.c_void_p(address), ctypes.c_int64(13))
print("survived")
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broken library, linked without torch's libraries, which take long to load."""
    folder = tmp_path_factory.mktemp("broken")
    source, library = folder / "broken.cpp", folder / "broken.so"
    source.write_text(BROKEN)
    torch_include = [f"-I{Path(torch.__file__).parent / 'include'}"]
    words = [
        *find_compiler(),
        *build.FLAGS,
        *FLAGS,
        f"-I{SOURCES}",
        *torch_include,
        "-shared",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(words, check=True, timeout=120)
    return library


@pytest.mark.parametrize("defect", list(DEFECTS))
def test_a_defect_is_reported(broken: Path, defect: str) -> None:
    done = run_sanitized(["-c", CALL, str(broken), defect, "memory"])
    assert done.returncode != 0 and DEFECTS[defect] in report_of(done), done.stderr
    assert "survived" not in done.stdout


def test_a_tensor_s_memory_is_watched(broken: Path) -> None:
    done = run_sanitized(["-c", CALL, str(broken), "past_the_end", "tensor"])
    assert done.returncode != 0 and DEFECTS["past_the_end"] in report_of(done), done.stderr
    done = run_sanitized(["-c", CALL, str(broken), "right", "tensor"])
    assert done.returncode == 0 and "survived" in done.stdout and not report_of(done), done.stderr

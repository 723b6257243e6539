"""The instruction set that the CPU operators are compiled for, and whether matrix tiles may be used.

    amx_bf16 > avx512_bf16 > avx512 > avx2 > portable

A processor that has a set also has all sets after it; `auto` is the fastest of them.  `emulated_amx` is the code of
`amx_bf16` on any processor, for tests.  Of all properties of the machine, results depend on the set only.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

TILES = "amx_bf16"
EMULATED_TILES = "emulated_amx"
_NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
# The flags of the compiler in addition to `-march=native`, and the flags of /proc/cpuinfo that a set needs.
COMPILER_FLAGS = {
    TILES: (),
    "avx512_bf16": _NO_TILES,
    "avx512": (*_NO_TILES, "-mno-avx512bf16"),
    "avx2": ("-march=x86-64-v3",),
    "portable": ("-march=x86-64",),
    EMULATED_TILES: ("-DLOCKSTEP_EMULATED_TILES",),
}
# The whole flags of the sets that wheels carry, and what these need in addition to `_NEEDS`.
SHIPPED_FLAGS = {
    TILES: ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
}
_SHIPPED_NEEDS = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}  # the level v3 of x86-64
_SHIPPED_NEEDS_AVX512 = {"avx512cd"}  # and the level v4
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_NEEDS = {
    TILES: _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma"},
    "portable": set[str](),
}
CHOICES = ("auto", *COMPILER_FLAGS)

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_TRIAL = "import sys; from rollout.kernels.tiles_trial import try_tiles; sys.exit(try_tiles(sys.argv[1]))"
_TRIAL_TIMEOUT_S = 120.0


def refusal_of(isa: str) -> str:
    """Return why operators for `isa`, one of `CHOICES`, cannot run on this processor; "" if they can."""
    if isa not in CHOICES:
        return f"no instruction set {isa!r}: it is one of {', '.join(CHOICES)}"
    if isa in ("auto", EMULATED_TILES):
        return ""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{isa} needs an x86 processor, but this one is {platform.machine()}"
    missing = _NEEDS[isa] - processor_flags()
    return f"this processor has no {', '.join(sorted(missing))}: {isa} cannot run on it" if missing else ""


def shipped_isa(isa: str) -> str:
    """Return the set of `SHIPPED_FLAGS` that serves for `isa`, one of `CHOICES`; "" if none does on this processor."""
    chosen = "avx2" if isa == "auto" else isa
    if chosen not in SHIPPED_FLAGS or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    needs = _NEEDS[chosen] | _SHIPPED_NEEDS | (_SHIPPED_NEEDS_AVX512 if chosen != "avx2" else set())
    return "" if needs - processor_flags() else chosen


def has_tiles() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and not _NEEDS[TILES] - processor_flags()


def fastest_beside_tiles() -> str:
    """Choose the one of `CHOICES` to compile for where matrix tiles cannot be used.

    Intel's cores since Sapphire Rapids have the flag avx512_fp16.  They begin a product of pairs of bfloat16
    (vdpbf16ps) every second cycle, but two products of floats in every cycle: floats are twice as fast there.
    """
    slow_pairs = processor_vendor() == "GenuineIntel" and "avx512_fp16" in processor_flags()
    order = ("avx512", "avx512_bf16") if slow_pairs else ("avx512_bf16", "avx512")
    return next((isa for isa in order if not refusal_of(isa)), "auto")


def processor_flags() -> set[str]:
    """Return the flags of the first processor, as Linux spells them; empty elsewhere."""
    return set(_first_processor("flags").split())


def processor_vendor() -> str:
    """Return the vendor of the first processor, as Linux spells it; "" elsewhere."""
    return _first_processor("vendor_id")


def _first_processor(field: str) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def request_tiles() -> bool:
    """Ask Linux to let this process use tile registers, which take 8 KiB of every thread's saved state."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def tiles_refusal(library: Path, answer: Path | None) -> str:
    """Return why the tiles of `library`, compiled for them, cannot be used; "" if they can.

    They are tried in a process of their own, once for each library, because a virtual machine may announce tiles that
    it does not have.  The result is kept in the file `answer`, if there is one.
    """
    if not request_tiles():
        return "Linux does not let this process use tile registers"
    if answer is None or not answer.exists():
        words = [sys.executable, "-c", _TRIAL, str(library)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_TRIAL_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:  # a busy machine, perhaps: the next start tries again
            return f"a trial of them did not end within {_TRIAL_TIMEOUT_S:g} s"
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        failure = f"died of signal {-done.returncode}" if done.returncode < 0 else f"failed: {last}"
        found = f"a trial of them {failure}" if done.returncode != 0 else ""
        if answer is not None:
            answer.write_text(found)
        return found
    return answer.read_text()

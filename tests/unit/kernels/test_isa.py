"""The instruction set to compile for: what a processor can run, refusals, and matrix tiles that may not be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.engine.load_kernels import load_kernels_of
from rollout.kernels import isa
from rollout.kernels.build import build_kernels, load_kernels

LIBRARY = """
#include <torch/library.h>
TORCH_LIBRARY_FRAGMENT(lockstep, m) { m.def("tiles_agree() -> bool", []() { BODY; }); }
"""
WITHOUT_PERMISSION = """
from rollout.kernels import isa
from rollout.kernels.build import load_kernels
isa.has_tiles, isa.request_tiles = lambda: True, lambda: False
print(load_kernels(print))
"""


@pytest.fixture
def avx2_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa, "processor_flags", lambda: {"avx", "avx2", "fma"})


@pytest.mark.usefixtures("avx2_machine")
def test_what_a_processor_lacks_is_named() -> None:
    assert not any(map(isa.refusal_of, ("auto", "avx2", "portable", "emulated_amx")))
    assert "no avx512bw, avx512dq, avx512f, avx512vl:" in isa.refusal_of("avx512")
    assert "amx_bf16, amx_tile" in isa.refusal_of("amx_bf16")
    assert isa.refusal_of("sse9").startswith("no instruction set 'sse9': it is one of auto, amx_bf16, ")


@pytest.mark.usefixtures("avx2_machine")
def test_other_processors_have_none_of_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa.platform, "machine", lambda: "aarch64")
    assert "aarch64" in isa.refusal_of("avx2") and not isa.refusal_of("auto") and not isa.has_tiles()


@pytest.mark.parametrize(
    ("vendor", "flags", "fastest"),
    [
        ("GenuineIntel", "avx512_bf16 avx512_fp16", "avx512"),  # since Sapphire Rapids
        ("GenuineIntel", "avx512_bf16", "avx512_bf16"),  # Cooper Lake
        ("GenuineIntel", "", "avx512"),  # before
        ("AuthenticAMD", "avx512_bf16 avx512_fp16", "avx512_bf16"),
        ("AuthenticAMD", "avx512_bf16", "avx512_bf16"),
    ],
)
@pytest.mark.usefixtures("avx2_machine")
def test_pairs_are_multiplied_where_they_are_fast(
    monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, fastest: str
) -> None:
    assert isa.fastest_beside_tiles() == "auto"
    avx512 = "avx512f avx512bw avx512vl avx512dq"
    monkeypatch.setattr(isa, "processor_flags", lambda: {*flags.split(), *avx512.split()})
    monkeypatch.setattr(isa, "processor_vendor", lambda: vendor)
    assert isa.fastest_beside_tiles() == fastest


def test_a_server_refuses_a_set_that_it_cannot_have() -> None:
    with pytest.raises(StartupError, match="--cpu-isa sse9: no instruction set"):
        load_kernels_of(ServerArgs(cpu_isa="sse9"), torch.device("cpu"))


def test_a_process_has_one_set() -> None:
    loaded = load_kernels().isa
    other = "portable" if loaded != "portable" else "emulated_amx"
    assert load_kernels(isa=loaded).available
    assert (
        load_kernels(isa=other).reason == f"the operators of this process were compiled for {loaded}, not for {other}"
    )


def test_a_trial_of_tiles_that_takes_too_long_is_made_again_at_the_next_start_n8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N8: such a trial left the server on plain torch, where other instructions would serve."""
    monkeypatch.setattr(isa, "request_tiles", lambda: True)
    monkeypatch.setattr(isa, "_TRIAL_TIMEOUT_S", 0.01)
    assert isa.tiles_refusal(tmp_path / "kernels.so", tmp_path / "tiles") == "a trial of them did not end within 0.01 s"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_tiles_without_permission_fall_back_with_a_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PERMISSION], capture_output=True, text=True, timeout=600, check=True
    )
    assert "matrix tiles are not used: Linux does not let this process use tile registers" in done.stdout
    assert "available=True" in done.stdout and "amx" not in done.stdout.splitlines()[-1]


@pytest.mark.full(but="other bits")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param("return false", "failed: their results differ", id="other bits"),
        pytest.param("__builtin_trap()", "died of signal", id="unknown instruction"),
        pytest.param("return true", "", id="right"),
    ],
)
def test_tiles_are_tried_once_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    monkeypatch.setenv("LOCKSTEP_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(isa, "request_tiles", lambda: True)
    monkeypatch.setattr(
        isa, "_TRIAL", f"from rollout.kernels import isa; isa.request_tiles = lambda: True; {isa._TRIAL}"
    )
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "tiles.cpp").write_text(LIBRARY.replace("BODY", body))
    library = build_kernels(sources=sources)
    answer = tmp_path / "tiles"
    found = isa.tiles_refusal(library, answer)
    assert reason in found and bool(found) == bool(reason)
    monkeypatch.setattr(isa.subprocess, "run", lambda *_, **__: pytest.fail("tried again"))
    assert isa.tiles_refusal(library, answer) == found

"""The CPU operators of a wheel: which of them serve, and where they do not."""

from __future__ import annotations

import ctypes
import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout.kernels import build, prebuild, shipped
from rollout.kernels import isa as isas
from rollout.kernels.build import load_kernels

V3 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
LOAD = """
import sys
from pathlib import Path
from rollout.kernels import isa, shipped
shipped.FOLDER = Path(sys.argv[1])
isa.has_tiles, isa.shipped_isa = lambda: False, lambda _: "avx2"
from rollout.kernels.build import load_kernels
print(load_kernels(print))
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a wheel with a file for each instruction set, for this torch and one source."""
    sources, folder = tmp_path / "csrc", tmp_path / "shipped"
    made = folder / shipped.folder_name(torch.__version__)
    sources.mkdir()
    made.mkdir(parents=True)
    (sources / "one.cpp").write_text("int one() { return 1; }\n")
    for isa in isas.SHIPPED_FLAGS:
        (made / f"{isa}.so").touch()
    (folder / "sources").write_text(shipped.hash_of_sources(sources) + "\n")
    monkeypatch.setattr(shipped, "FOLDER", folder)
    monkeypatch.setattr(shipped, "SOURCES", sources)
    monkeypatch.setattr(isas.platform, "machine", lambda: "x86_64")
    return folder


@pytest.mark.parametrize(
    ("flags", "isa", "found"),
    [
        (V3, "auto", "avx2"),
        (V4, "avx512", "avx512"),
        (V4 | {"avx512_bf16"}, "avx512_bf16", "avx512_bf16"),
        (V4 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "amx_bf16", "amx_bf16"),
        (V4 - {"avx512cd"}, "avx512", None),
        (V3 - {"movbe"}, "auto", None),
        (V4, "portable", None),
        (V4, "emulated_amx", None),
    ],
)
@pytest.mark.usefixtures("wheel")
def test_a_processor_gets_the_library_of_its_set(
    flags: set[str], isa: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isas, "processor_flags", lambda: flags)
    library = shipped.library_of(isa)
    assert (None if library is None else library.stem) == found
    assert library is None or shipped.holds(library)


def test_another_torch_or_other_sources_take_no_library(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isas, "processor_flags", lambda: V3)
    assert shipped.library_of("avx2") is not None
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "9.9.0+cpu")
        assert shipped.library_of("avx2") is None
    with monkeypatch.context() as other:
        other.setattr(isas.platform, "machine", lambda: "aarch64")
        assert shipped.library_of("avx2") is None
    (shipped.SOURCES / "one.cpp").write_text("int one() { return 2; }\n")
    assert shipped.library_of("avx2") is None


def test_a_patch_version_of_torch_has_the_same_folder() -> None:
    assert shipped.folder_name("2.13.0+cpu") == shipped.folder_name("2.13.1") == "torch-2.13"
    assert shipped.folder_name("2.12.0") != "torch-2.13"


def load(folder: Path, cache: Path) -> str:
    """Load the operators in a process without a compiler; return its output."""
    environment = {"PATH": "/nonexistent", "LOCKSTEP_KERNEL_CACHE": str(cache), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", LOAD, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_operators_of_a_wheel_load_without_a_compiler(tmp_path: Path) -> None:
    loaded, cache = load_kernels(), tmp_path / "cache"
    assert loaded.available and build._library_for(loaded.isa, None).is_file()
    folder = tmp_path / "shipped"
    library = folder / shipped.folder_name(torch.__version__) / "avx2.so"
    library.parent.mkdir(parents=True)
    (folder / "sources").write_text(shipped.hash_of_sources(shipped.SOURCES) + "\n")
    shutil.copyfile(build._library_for(loaded.isa, None), library)
    assert load(folder, cache) == f"KernelStatus(available=True, reason='', isa='{loaded.isa}')\n"
    assert not cache.exists(), "nothing was compiled or kept"
    library.write_bytes(b"not a library")
    said = load(folder, cache)
    assert said.startswith("the operators of the wheel do not load into torch ")
    assert "reason='no C++ compiler found: g++, clang++, c++'" in said


@pytest.mark.usefixtures("wheel")
def test_a_library_that_was_compiled_here_is_not_taken_for_one_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(build, "_library_for", lambda *_, **__: broken)
    said: list[str] = []
    with pytest.raises(OSError, match=r"kernels\.so"):
        build._load("portable", said.append)
    assert said == []


def test_a_folder_for_a_wheel_is_compiled_and_matches_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, folder = tmp_path / "csrc", tmp_path / "shipped"
    sources.mkdir()
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(shipped, "SOURCES", sources)
    monkeypatch.setattr(shipped, "FOLDER", folder)
    monkeypatch.setenv("LOCKSTEP_KERNEL_CACHE", str(tmp_path / "objects"))
    assert prebuild.main([str(folder), "--isa", "avx2", "avx512"]) == 0
    made = shipped.folder()
    assert made is not None and sorted(path.name for path in made.iterdir()) == ["avx2.so", "avx512.so"]
    assert ctypes.CDLL(str(made / "avx2.so")).answer() == 42
    assert len(list((tmp_path / "objects/objects").glob("*.o"))) == 3, "objects are kept for the next try"
    driver = shipped.driver_library()
    assert driver is not None and ctypes.CDLL(str(driver)).lockstep_pages_open
    (folder / "driver/sources").write_text("of another version\n")
    assert shipped.driver_library() is None


def test_a_folder_for_a_wheel_may_lie_on_another_file_system_than_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, cache = tmp_path / "csrc", tmp_path / "cache"
    sources.mkdir()
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(shipped, "SOURCES", sources)
    monkeypatch.setenv("LOCKSTEP_KERNEL_CACHE", str(cache))
    replace = Path.replace

    def replace_within(self: Path, target: Path) -> Path:
        if self.is_relative_to(cache) != target.is_relative_to(cache):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_within)
    assert prebuild.main([str(tmp_path / "shipped"), "--isa", "avx2"]) == 0
    assert [path.suffix for path in (cache / "objects").iterdir()] == [".o", ".o"], "nothing else is left"


def test_a_folder_without_torch_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prebuild.main([str(tmp_path / "out"), "--torch", str(tmp_path)]) == 1
    assert "is not the package folder of torch" in capsys.readouterr().err
    (tmp_path / "version.py").write_text("__version__ = '2.12.1+cu130'\n")
    assert prebuild.version_of(tmp_path) == "2.12.1+cu130"

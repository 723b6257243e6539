"""The operators' build: what its cache depends on, two processes at once, and machines that cannot compile."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rollout.cli import build_kernels as command
from rollout.kernels import build
from rollout.kernels.build import KernelBuildError, build_kernels, cache_folder, cache_key, find_compiler

ANSWER = 'extern "C" int answer() { return 42; }\n'
TEMPLATE = """
import sys
from pathlib import Path
from rollout.kernels.build import build_kernels
print(build_kernels(lambda line: print("progress", file=sys.stderr), sources=Path(sys.argv[1])))
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one small source, and an empty cache."""
    monkeypatch.setenv("LOCKSTEP_KERNEL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text(ANSWER)
    return folder


def test_a_library_is_built_once_and_works(sources: Path) -> None:
    lines: list[str] = []
    library = build_kernels(lines.append, sources)
    assert ctypes.CDLL(str(library)).answer() == 42
    assert len(lines) == 1 and "compiling" in lines[0]
    first = library.stat().st_mtime_ns
    assert build_kernels(lines.append, sources) == library
    assert len(lines) == 1 and library.stat().st_mtime_ns == first
    assert [path.name for path in sorted(library.parent.iterdir())] == ["kernels.so", "lock"]


def test_the_key_follows_sources_flags_torch_and_processor(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [cache_key(sources)]
    assert cache_key(sources) == keys[0]
    (sources / "answer.cpp").write_text(ANSWER + "// changed\n")
    keys.append(cache_key(sources))
    (sources / "answer.cpp").rename(sources / "other.cpp")
    keys.append(cache_key(sources))
    (sources / "a.h").write_text("// a header counts too\n")
    keys.append(cache_key(sources))
    for name, value in (
        ("FLAGS", (*build.FLAGS, "-DX")),
        ("_cpu_features", lambda: ("another processor",)),
    ):
        monkeypatch.setattr(build, name, value)
        keys.append(cache_key(sources))
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.append(cache_key(sources))
    assert len(set(keys)) == len(keys)


def test_two_processes_compile_it_once(sources: Path) -> None:
    words = [sys.executable, "-c", TEMPLATE, str(sources)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    library = Path(outputs[0][0].strip())
    assert ctypes.CDLL(str(library)).answer() == 42
    assert [path.name for path in sorted(library.parent.iterdir())] == ["kernels.so", "lock"]


def test_waiting_for_another_process_has_a_deadline(sources: Path) -> None:
    folder = cache_folder() / cache_key(sources)
    folder.mkdir(parents=True, mode=0o700)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = time.monotonic()
        with pytest.raises(KernelBuildError, match="another process has held"):
            build_kernels(sources=sources, timeout_s=0.3)
        assert 0.3 <= time.monotonic() - start < 5
    assert build_kernels(sources=sources).exists()


def test_a_compiler_that_hangs_is_given_up(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelBuildError, match="did not finish within"):
        build_kernels(sources=sources, timeout_s=0.5)


def test_a_compiler_is_limited_by_its_own_work_and_not_by_the_clock_n8(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N8: on a busy machine 300 s of the clock ended a compiler that had used a fraction of them."""
    compiler = tmp_path / "busy"
    compiler.write_text("#!/bin/sh\nwhile :; do :; done\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "COMPILE_CPU_S", 1)
    with pytest.raises(KernelBuildError, match="did not finish within 1 s of CPU"):
        build_kernels(sources=sources)
    assert build.COMPILE_TIMEOUT_S >= 1800


def test_what_was_compiled_before_a_failure_is_kept_n8(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N8: finished objects were thrown away, so that the next start began anew."""
    log = tmp_path / "log"
    compiler = tmp_path / "noting"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {" ".join(find_compiler())} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    wrong = sources / "wrong.cpp"
    wrong.write_text("int f() { return undeclared; }\n")
    with pytest.raises(KernelBuildError, match="undeclared"):
        build_kernels(sources=sources)
    wrong.write_text("int f() { return 3; }\n")
    library = build_kernels(sources=sources)
    assert ctypes.CDLL(str(library)).answer() == 42
    compiled = [line for line in log.read_text().splitlines() if " -c " in f" {line} "]
    assert [sum(name in line for line in compiled) for name in ("answer.cpp", "wrong.cpp")] == [1, 2]
    (sources / "a.h").write_text("// every object may depend on a header\n")
    build_kernels(sources=sources)
    assert sum("answer.cpp" in line for line in log.read_text().splitlines()) == 2
    old = next((cache_folder() / "objects").glob("*.o"))
    os.utime(old, (0, 0))
    wrong.unlink()
    build_kernels(sources=sources)
    assert not old.exists() or old.stat().st_mtime > 0, "it was removed, or used again"


def test_a_source_that_does_not_compile_leaves_nothing_behind(sources: Path) -> None:
    (sources / "wrong.cpp").write_text("int f() { return undeclared; }\n")
    with pytest.raises(KernelBuildError, match="undeclared"):
        build_kernels(sources=sources)
    assert [path.name for path in (cache_folder() / cache_key(sources)).iterdir()] == ["lock"]


def test_a_folder_that_others_may_write_is_refused(sources: Path) -> None:
    folder = cache_folder() / cache_key(sources)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(KernelBuildError, match="written by other users"):
        build_kernels(sources=sources)


def test_a_cache_that_cannot_be_created_is_an_answer(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_KERNEL_CACHE", str(sources / "answer.cpp"))
    with pytest.raises(KernelBuildError, match="cannot be used"):
        build_kernels(sources=sources)


def test_a_user_without_a_home_folder_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that it does not know."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for variable in ("HOME", "LOCKSTEP_KERNEL_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(KernelBuildError, match="no home folder to keep compiled operators in: set"):
        build_kernels()
    assert build._answer_of(build.shipped.FOLDER / "torch-2.13/amx_bf16.so") is None


def test_the_compiler_is_found_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -flag")
    assert find_compiler() == [sys.executable, "-flag"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(KernelBuildError, match=r"g\+\+, clang\+\+, c\+\+"):
        find_compiler()


def test_without_a_compiler_the_reason_is_reported_and_nothing_is_raised(tmp_path: Path) -> None:
    """The test runs in a process of its own, as this one has the operators loaded."""
    script = "from rollout.cli.build_kernels import main; import sys; sys.exit(main([]))"
    environment = {"PATH": "/nonexistent", "LOCKSTEP_KERNEL_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "not available, plain torch is used instead: no C++ compiler found" in done.stdout


def test_the_command_builds_and_names_the_instruction_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "CPU operators are ready (" in capsys.readouterr().out

"""Check programs in C++ over the operators' headers, compiled once for the same sources, flags and processor."""

from __future__ import annotations

import platform
import subprocess
import tempfile
from pathlib import Path

import torch

from rollout.kernels.build import FLAGS, SOURCES, cache_folder, cache_key, find_compiler

X86 = platform.machine() == "x86_64"
# Of the processor that runs the tests and of lesser ones, as the compiler calls them.
TARGETS = {"native": "native"} | ({"avx2": "x86-64-v3", "portable": "x86-64"} if X86 else {})
COMPILE_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 120.0


def run_check(
    program: Path, march: str = "native", headers: Path = SOURCES, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Compiles `program` with the headers in this folder if no one has done so before, and runs it."""
    binary = _compiled(program, headers, (f"-march={march}", *flags))
    return subprocess.run([str(binary)], check=False, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)


def headers_with(mistake: tuple[str, str, str], folder: Path) -> Path:
    """Writes the operators' sources to this folder, with a mistake: file, what stands there, what replaces it."""
    file, right, wrong = mistake
    for path in SOURCES.iterdir():
        text = path.read_text()
        assert path.name != file or text.count(right) == 1
        (folder / path.name).write_text(text.replace(right, wrong) if path.name == file else text)
    return folder


def _compiled(program: Path, headers: Path, flags: tuple[str, ...]) -> Path:
    torch_root = Path(torch.__file__).parent  # the binary finds torch's library there: part of what it is
    words = (*find_compiler(), *flags, str(torch_root), program.read_text())
    folder = cache_folder() / f"check-{cache_key(headers, words)}"
    binary = folder / program.stem
    if binary.exists():
        return binary
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    usual = [flag for flag in FLAGS if not flag.startswith("-march")]
    command = [*find_compiler(), *usual, *flags, f"-I{headers}", f"-I{torch_root / 'include'}", str(program)]
    libraries = [f"-L{torch_root / 'lib'}", f"-Wl,-rpath,{torch_root / 'lib'}", "-lc10"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / program.stem
        subprocess.run(
            [*command, *libraries, "-o", str(target)], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S
        )
        target.replace(binary)
    return binary

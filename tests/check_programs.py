"""Check programs in C++ over the operators' headers, compiled once for the same sources, flags and processor."""

from __future__ import annotations

import platform
import subprocess
import tempfile
from pathlib import Path

import torch

from rollout.kernels.build import FLAGS, SOURCES, cache_folder, cache_key, find_compiler, load_kernels
from rollout.kernels.isa import COMPILER_FLAGS, refusal_of

X86 = platform.machine() == "x86_64"
# The instruction set of this machine's operators, and all instruction sets that the machine can run.
TARGETS = ("native", *(isa for isa in COMPILER_FLAGS if X86 and not refusal_of(isa)))
COMPILE_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 120.0


def run_check(
    program: Path, target: str = "native", headers: Path = SOURCES, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Compile `program` with the headers in this folder, unless an earlier call did so, and run it."""
    compiled_for = usual_flags() if target == "native" else COMPILER_FLAGS[target]
    binary = _compiled(program, headers, (*compiled_for, *flags))
    return subprocess.run([str(binary)], check=False, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)


def usual_flags() -> tuple[str, ...]:
    """Return the flags of the operators that this machine loads, without the flags common to all."""
    return COMPILER_FLAGS[load_kernels().isa] if X86 else ()


def headers_with(mistake: tuple[str, str, str], folder: Path) -> Path:
    """Write the operators' sources to this folder with a mistake: a file, the right text, and the text in its place."""
    file, right, wrong = mistake
    for path in SOURCES.iterdir():
        text = path.read_text()
        assert path.name != file or text.count(right) == 1
        (folder / path.name).write_text(text.replace(right, wrong) if path.name == file else text)
    return folder


def _compiled(program: Path, headers: Path, flags: tuple[str, ...]) -> Path:
    torch_root = Path(torch.__file__).parent  # the binary finds torch's library there: part of its key
    words = (*find_compiler(), *flags, str(torch_root), program.read_text())
    folder = cache_folder() / f"check-{cache_key(headers, words)}"
    binary = folder / program.stem
    if binary.exists():
        return binary
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [*find_compiler(), *FLAGS, *flags, f"-I{headers}", f"-I{torch_root / 'include'}", str(program)]
    libraries = [f"-L{torch_root / 'lib'}", f"-Wl,-rpath,{torch_root / 'lib'}", "-lc10"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / program.stem
        subprocess.run(
            [*command, *libraries, "-o", str(target)], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S
        )
        target.replace(binary)
    return binary

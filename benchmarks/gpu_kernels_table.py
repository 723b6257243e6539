"""The compiled form of every Triton kernel, on a machine without a GPU: `python -m benchmarks.gpu_kernels_table`.

It compiles each `CompileCase` of `rollout.kernels.gpu` for compute capability 9.0 (H100, H200).  It prints the
registers of a thread, the bytes that it spills to memory, the shared memory of a block, and the instructions that
multiply matrices: `wgmma` of Hopper, `mma` of all since Ampere, or none.  Registers and spills are read from the binary
by `cuobjdump`, which comes with triton; another release of triton compiles to others.  The last column is True if the
kernel waits for its predecessor before it touches memory (`rollout.kernels.gpu.launch_options`).

    python -m benchmarks.gpu_kernels_table [--only WORDS] [--json FILE]

Nothing is launched.  The first run takes some seconds a kernel; triton keeps what it compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table

import rollout.kernels.gpu
from benchmarks import experts_cases
from benchmarks.compile_cases import HOPPER, CompileCase, compile_for

DUMP_TIMEOUT_S = 60.0
# Branches, ends, calls, and instructions that touch memory, except loads of arguments.
_TOUCHES = re.compile(
    r"(bra|brx|ret|exit|call|st|atom|red|cp|prefetch|prefetchu|ldu|ldmatrix|mbarrier|multimem)\b|ld\b(?!\.param)"
)


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled.  `spilled_bytes`: local memory of a thread, which holds what registers do not.

    `waits_first`: see the function of this name.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instruction: str
    warps: int
    stages: int
    waits_first: bool


def cases(only: str = "") -> list[CompileCase]:
    """Return the cases of every module of `rollout.kernels.gpu` that has kernels; `only`: words in their names."""
    found = list(experts_cases.compile_cases())
    for module in pkgutil.iter_modules(rollout.kernels.gpu.__path__, f"{rollout.kernels.gpu.__name__}."):
        of_module = getattr(import_module(module.name), "compile_cases", None)
        found += [CompileCase(*case) for case in of_module()] if callable(of_module) else []
    return [case for case in found if only in case.name]


def compile_case(case: CompileCase) -> Compiled:
    """Compile one, or take it from triton's cache."""
    kernel = compile_for(case)
    registers, spilled = resources(kernel.asm["cubin"])
    instruction = next((word for word in ("wgmma", "mma") if f"{word}." in kernel.asm["ptx"]), "")
    sizes = registers, spilled, kernel.metadata.shared
    return Compiled(case.name, *sizes, instruction, case.num_warps, case.num_stages, waits_first(kernel.asm["ptx"]))


def waits_first(ptx: str) -> bool:
    """Return whether a kernel waits for its predecessor before anything else, and then lets its successor begin.

    Before the wait it must not branch, end, or touch memory other than its arguments.  Each of the two instructions
    occurs once, and no condition holds it back.
    """
    _, _, body = ptx.partition(".entry")[2].partition("{")
    words = re.findall(r"^\s*((?:@!?%\w+\s+)?[a-z][\w.:]*)", body, re.MULTILINE)
    places = [i for i, word in enumerate(words) if "griddepcontrol" in word]
    if [words[i] for i in places] != ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]:
        return False
    return not any(_TOUCHES.match(word.split()[-1]) for word in words[: places[0]])


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of local memory of a thread, read from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [str(tool), "-res-usage", file.name]
        said = subprocess.run(words, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=True).stdout
    registers, stack, local = (re.findall(rf"\b{word}:(\d+)", said) for word in ("REG", "STACK", "LOCAL"))
    if not len(registers) == len(stack) == len(local) == 1:
        raise RuntimeError(f"cuobjdump does not describe one kernel: {said!r}")
    return int(registers[0]), int(stack[0]) + int(local[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kernels_table", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="only kernels whose names contain these words")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 interprets kernels instead of compiling them: unset it")
    console = Console()
    chosen = cases(args.only)
    if not chosen:
        raise SystemExit(f"no kernel's name holds {args.only!r}")
    rows = [compile_case(case) for case in track(chosen, "compiling", console=console, transient=True)]
    columns = ("kernel", "registers", "spilled", "shared", "matrix product", "warps", "stages", "waits")
    table = Table(*columns, title=f"sm_{HOPPER}, triton {triton.__version__}; bytes")
    for row in rows:
        table.add_row(*map(str, asdict(row).values()), style="red" if row.spilled_bytes else None)
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

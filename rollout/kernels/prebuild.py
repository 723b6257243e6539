"""Compiles the CPU operators for a wheel: `python -m rollout.kernels.prebuild FOLDER [--torch ROOT ...]`.

Each library is for a minor version of torch and an instruction set, whatever processor compiles it.  ROOT is the folder
`torch` of an unpacked wheel: its headers and libraries are used, and it is not imported.  By default it is the torch of
this environment.  `rollout.kernels.shipped` describes the folder that is written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rollout.core.console import fail, say
from rollout.kernels import shipped
from rollout.kernels.build import COMMON_FLAGS, KernelBuildError, Target, compile_library, find_compiler
from rollout.kernels.isa import SHIPPED_FLAGS


def main(words: Sequence[str]) -> int:
    """Compile what is asked for, and return the exit status.  Finished objects stay in the cache."""
    parser = argparse.ArgumentParser(prog="rollout.kernels.prebuild", description="Compile the operators of a wheel.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", type=Path, nargs="+", default=[Path(torch.__file__).parent], metavar="ROOT")
    parser.add_argument("--isa", nargs="+", default=list(SHIPPED_FLAGS), choices=list(SHIPPED_FLAGS))
    args = parser.parse_args(words)
    try:
        for root in args.torch:
            target = Target(root, version_of(root))
            for isa in args.isa:
                made = args.folder / shipped.folder_name(target.torch_version) / f"{isa}.so"
                _compile(shipped.SOURCES, made, SHIPPED_FLAGS[isa], target)
        driver = args.folder / shipped.DRIVER
        _compile(shipped.DRIVER_SOURCES, driver / shipped.DRIVER_FILE, ("-march=x86-64",), target)
    except KernelBuildError as error:
        return fail(str(error))
    for folder, sources in ((args.folder, shipped.SOURCES), (driver, shipped.DRIVER_SOURCES)):
        (folder / shipped.SOURCES_FILE).write_text(shipped.hash_of_sources(sources) + "\n")
    return 0


def version_of(root: Path) -> str:
    """Return the version of the torch whose package folder is `root`.  Raises `KernelBuildError`."""
    stated = root / "version.py"
    found = re.search(r"^__version__ = '([^']+)'", stated.read_text(), re.MULTILINE) if stated.is_file() else None
    if found is None:
        raise KernelBuildError(f"{root} is not the package folder of torch: it has no version.py with a version")
    return found[1]


def _compile(sources: Path, made: Path, march: tuple[str, ...], target: Target) -> None:
    made.parent.mkdir(parents=True, exist_ok=True)
    say(f"compiling {made.parent.name}/{made.name} for torch {target.torch_version}")
    flags = (*COMMON_FLAGS, *march, "-g0", "-Wl,--strip-debug")
    compile_library(find_compiler(), sources, made, flags, target, progress=say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

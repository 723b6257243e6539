"""Adds to a wheel what does not lie in its packages; everything else is in pyproject.toml.

    lockstep_rl/bundled/         examples/ and benchmarks/, which the commands of `lockstep` run
    rollout/kernels/shipped/     the compiled CPU operators in the folder $LOCKSTEP_SHIPPED, if it is set

A wheel with operators is for Linux on one kind of processor and any Python: `make wheels` makes it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from platform import machine

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
BUNDLED = ("examples", "benchmarks")
SUFFIXES = {".py", ".txt", ".md", ".json", ".jsonl"}
SHIPPED = os.environ.get("LOCKSTEP_SHIPPED")


class BuildWithFolders(build_py):
    """The step that copies modules, and then the folders above."""

    def run(self) -> None:
        build = Path(self.build_lib)
        if not self.editable_mode:
            shutil.rmtree(build, ignore_errors=True)  # files of an earlier build that are no longer there
        super().run()
        if self.editable_mode:
            return
        for name in BUNDLED:
            _copy(HERE / name, build / "lockstep_rl" / "bundled" / name)
        if SHIPPED is not None:
            libraries = Path(SHIPPED)
            if not (libraries / "sources").is_file():
                raise SystemExit(f"$LOCKSTEP_SHIPPED names {libraries}, which has no operators: run make wheels")
            shutil.copytree(libraries, build / "rollout" / "kernels" / "shipped", dirs_exist_ok=True)


class WithOperators(Distribution):
    """A distribution that is for one platform where it has operators."""

    def has_ext_modules(self) -> bool:
        return SHIPPED is not None


class WheelForAnyPython(bdist_wheel):
    """A wheel that any Python can use: the operators know torch and no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform if SHIPPED is None else f"manylinux_{_newest_glibc(Path(SHIPPED))}_{machine()}"


def _newest_glibc(folder: Path) -> str:
    """Return the version of glibc that the libraries need, as `2_34`: the part of the tag that PEP 600 defines."""
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.so")))
    return f"2_{max(map(int, re.findall(rb'GLIBC_2[.]([0-9]+)', text)), default=17)}"


def _copy(folder: Path, target: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts:
            made = target / path.relative_to(folder)
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, made)


setup(distclass=WithOperators, cmdclass={"build_py": BuildWithFolders, "bdist_wheel": WheelForAnyPython})

"""Adds to a wheel what does not lie in its packages; everything else is in pyproject.toml.

    lockstep_rl/bundled/         examples/ and benchmarks/, which the commands of `lockstep` run
    rollout/kernels/shipped/     the compiled CPU operators in the folder $LOCKSTEP_SHIPPED, if it is set

A wheel with operators is for Linux on one kind of processor and any Python: `make wheels` makes it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import setup
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


class WheelOfOperators(bdist_wheel):
    """A wheel that any Python of a platform can use, where it has operators."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = SHIPPED is None

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def _copy(folder: Path, target: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts:
            made = target / path.relative_to(folder)
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, made)


setup(cmdclass={"build_py": BuildWithFolders, "bdist_wheel": WheelOfOperators})

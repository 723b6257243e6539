"""Wheels and source distributions of this tree, and a folder with an unpacked wheel that runs outside the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


def copy_of_tree(folder: Path) -> Path:
    """Copy the files that git tracks or would track, so that a build writes nothing into the tree."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_file() and not name.startswith(("docs/", "tests/")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return folder


def build(kind: str, tree: Path, out: Path, **environment: str) -> Path:
    """Build a `wheel` or an `sdist` of `tree` with the setuptools of this environment, and return it."""
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)],
        cwd=tree,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def unpacked(wheel: Path, folder: Path) -> Path:
    """Write the files of a wheel as an installer does, and return the folder to put on the path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def lockstep(site: Path, cwd: Path, *words: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run the command of an unpacked wheel in a folder outside the tree."""
    return subprocess.run(
        [sys.executable, "-m", "lockstep_rl.command", *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
